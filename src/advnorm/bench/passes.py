"""Cost of an attack in passes over the network, which does not depend on the computer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from advnorm.attacks import CascadeResult


@dataclass(frozen=True, kw_only=True)
class StagePasses:
    """Forwards and backwards of one stage, divided by the number of all images."""

    forwards: float = 0.0
    backwards: float = 0.0

    @property
    def total(self) -> float:
        """Forwards and backwards; to the image, a backward costs as much as a forward."""
        return self.forwards + self.backwards


def passes_by_stage(result: CascadeResult) -> dict[str, StagePasses]:
    images = len(result.x_adv)
    return {
        stage: StagePasses(forwards=forwards / images, backwards=result.backwards[stage] / images)
        for stage, forwards in result.forwards.items()
    }


def total_passes(stages: Mapping[str, StagePasses]) -> float:
    """Forwards and backwards of all stages per image."""
    return sum(stage.total for stage in stages.values())


def mean_passes(networks: Sequence[Mapping[str, StagePasses]]) -> dict[str, StagePasses]:
    """Average over networks; a stage that a network lacks took no passes."""
    means = {}
    for name in dict.fromkeys(name for stages in networks for name in stages):
        each = [stages.get(name, StagePasses()) for stages in networks]
        means[name] = StagePasses(
            forwards=fmean(stage.forwards for stage in each), backwards=fmean(stage.backwards for stage in each)
        )
    return means
