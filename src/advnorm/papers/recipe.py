"""The training recipe that the papers share. A paper's module names what differs."""

from __future__ import annotations

from typing import Any

from advnorm.config import Config, Named

#: The last checkpoint is evaluated, so no images are held out.
RECIPE: dict[str, Any] = {
    "norm": "bn",
    "augment": "crop_flip",
    "held_out": 0,
    "validate_every": 0,
    "batch_size": 128,
    "lr": 0.1,
    "momentum": 0.9,
    "weight_decay": 5e-4,
    "schedule": "step",
}


def sgd(model: Named, data: Named, *, epochs: int, milestones: tuple[float, ...], **changes: Any) -> Config:
    """SGD with momentum and a learning rate that decays at milestones."""
    return Config(model=model, data=data, epochs=epochs, milestones=milestones, **{**RECIPE, **changes})
