"""Wide ResNets WRN-d-k, Zagoruyko & Komodakis 2016: pre-activation blocks, k times the channels, no dropout."""

from __future__ import annotations

from functools import partial

from advnorm.models.preact_resnet import PreActResNet
from advnorm.models.registry import register_model

for _depth, _k in ((28, 10), (34, 10), (40, 2)):
    _build = partial(
        PreActResNet,
        depths=((_depth - 4) // 6,) * 3,
        channels=(16 * _k, 32 * _k, 64 * _k),
        stem_channels=16,
        final_norm=True,
    )
    register_model(f"wrn_{_depth}_{_k}")(_build)
