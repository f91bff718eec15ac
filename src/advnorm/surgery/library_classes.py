"""Norm classes of timm, torchvision and transformers, by qualified name, so that no library is imported.

A per-sample norm runs the forward of its class, so its row only names its kind. A batch norm's row also
names the children that the class applies to its output. The first row that matches decides. Classes that are not
listed are rejected by name.
"""

from __future__ import annotations

#: Kind, children that a batch norm applies to its output, patterns of qualified names.
LIBRARY_CLASSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("batch_norm_2d", ("drop", "act"), ("timm.layers.norm_act.BatchNormAct2d",)),
    ("batch_norm", ("drop", "act"), ("timm.layers.norm_act.SyncBatchNormAct",)),
    (
        "layer_norm_2d",
        (),
        (
            "timm.layers.norm.LayerNorm*2d*",
            "timm.layers.norm_act.LayerNorm*2d*",
            "timm.models.metaformer.LayerNorm2d*",
            "torchvision.models.convnext.LayerNorm2d",
            "transformers.*.modeling_vitdet.VitDetLayerNorm",
        ),
    ),
    (
        "layer_norm",
        (),
        (
            "timm.layers.norm.LayerNorm*",
            "timm.layers.norm_act.LayerNorm*",
            "timm.models.metaformer.LayerNorm*",
            "transformers.*.modeling_*LayerNorm",
        ),
    ),
    (
        "group_norm",
        (),
        (
            "timm.layers.norm.GroupNorm*",
            "timm.layers.norm_act.GroupNorm*",
            "timm.models.metaformer.GroupNorm*",
            "transformers.*.modeling_*GroupNorm",
            "transformers.*.modeling_*GroupNormActivation",
        ),
    ),
    (
        "rms_norm_2d",  # divides by a root mean square or a standard deviation, and does not subtract a mean
        (),
        (
            "timm.layers.norm.RmsNorm2d*",
            "timm.layers.norm_act.RmsNormAct2d*",
            "timm.layers.norm.SimpleNorm2d*",
            "timm.layers.evo_norm.EvoNorm2dS*",
            "timm.layers.filter_response_norm.FilterResponseNorm*",
        ),
    ),
    (
        "rms_norm",
        (),
        (
            "timm.layers.norm.RmsNorm*",
            "timm.layers.norm_act.RmsNorm*",
            "timm.layers.norm.SimpleNorm*",
            "transformers.*.modeling_*RMSNorm",
        ),
    ),
)
