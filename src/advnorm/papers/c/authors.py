"""The protocol ``authors``: what the authors' code of paper C does differently from the text.

Not reproduced: that code chooses the best checkpoint by adversarial accuracy alone.
"""

from __future__ import annotations

from dataclasses import replace

from advnorm.config import Config, Named
from advnorm.studies.registry import register_protocol
from advnorm.studies.study import Cell

#: The last norm of each stage, which alone is a mixture norm there.
LAST_NORMS = {
    "preact_resnet18": ("layer1.1.bn2", "layer2.1.bn2", "layer3.1.bn2", "layer4.1.bn2"),
    "imagenet_resnet34": ("layer1.2.bn2", "layer2.3.bn2", "layer3.5.bn2", "layer4.2.bn2"),
}
#: Weight of the likelihood, which is a mean over images and positions there.
LIKELIHOOD_WEIGHT = 1e-3


@register_protocol("C", "authors")
def authors(cell: Cell) -> Cell:
    """No norm at the end of the network, crops with repeated borders, selection every second epoch.

    Instance norm has no affine parameters. Only the last norm of each stage is a mixture norm, and its likelihood is a
    mean. The learning rate on Imagenette is 0.01.
    """
    config = cell.config
    norm = config.norm
    if norm == "gmm_bn":
        norm = (*((layer, "gmm_bn") for layer in LAST_NORMS[config.model.name]), ("*", "bn"))
    changes = {
        "augment": "crop_flip_edge",
        "validate_every": 2,
        "objective": _with_mean_likelihood(config),
        "model": Named("preact_resnet18") if config.model.name == "preact_resnet18" else config.model,
        "norm": norm,
        "norm_options": {"affine": False} if config.norm == "in" else config.norm_options,
        "lr": 0.01 if config.data.name == "imagenette" else config.lr,
    }
    return replace(cell, config=replace(config, **changes))


def _with_mean_likelihood(config: Config) -> Named:
    options = config.objective.options
    if not options.get("likelihood_weight"):
        return config.objective
    mean = {"likelihood_weight": LIKELIHOOD_WEIGHT, "likelihood_positions": "mean"}
    return Named(config.objective.name, **{**options, **mean})
