"""Norm classes of timm, torchvision and transformers, by qualified name, so that no library is imported.

A per-sample norm runs the forward of its class, so its row only says which kind of norm it is. A batch norm's row also
names the children that the class applies to its output. Classes that are not listed are rejected by name.
"""

from __future__ import annotations

#: Kind, children that a batch norm applies to its output, patterns of qualified names.
LIBRARY_CLASSES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("batch_norm_2d", ("drop", "act"), ("timm.layers.norm_act.BatchNormAct2d",)),
    ("batch_norm", ("drop", "act"), ("timm.layers.norm_act.SyncBatchNormAct",)),
    (
        "layer_norm",
        (),
        (
            "timm.layers.norm.LayerNorm*",
            "timm.layers.norm_act.LayerNorm*",
            "timm.models.metaformer.LayerNorm*",
            "torchvision.models.convnext.LayerNorm2d",
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
        "rms_norm",  # divides by a root mean square or a standard deviation, and does not subtract a mean
        (),
        (
            "timm.layers.norm.RmsNorm*",
            "timm.layers.norm_act.RmsNorm*",
            "timm.layers.norm.SimpleNorm*",
            "timm.layers.evo_norm.EvoNorm2dS*",
            "timm.layers.filter_response_norm.FilterResponseNorm*",
            "transformers.*.modeling_*RMSNorm",
        ),
    ),
)
