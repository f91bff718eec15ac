"""What wraps an objective and is one itself."""

from __future__ import annotations

import inspect

from torch import Tensor, nn

from advnorm._core.errors import ConfigError
from advnorm.attacks.base import Attack
from advnorm.objectives.base import Images, Objective, Step, TrainingStatistics


class Wrapper(Objective):
    """An objective around another; what an engine sets on it (attack, statistics) it sets on the one inside."""

    def __init__(self, objective: Objective) -> None:
        if not isinstance(objective, Objective):
            raise ConfigError(
                f"{type(self).__name__} wraps an objective such as Hybrid(model, attack), got {objective!r:.80}"
            )
        nn.Module.__init__(self)
        self.objective = objective

    @classmethod
    def options(cls) -> dict[str, inspect.Parameter]:
        """The wrapper's own options; the wrapped objective has its own."""
        return {name: p for name, p in super().options().items() if name not in Objective.options()}

    @property
    def model(self) -> nn.Module:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.model

    @property
    def needs_attack(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.objective.needs_attack

    @property
    def attack(self) -> Attack | None:
        return self.objective.attack

    @attack.setter
    def attack(self, attack: Attack | None) -> None:
        self.objective.attack = attack

    @property
    def statistics(self) -> TrainingStatistics:
        return self.objective.statistics

    @statistics.setter
    def statistics(self, statistics: TrainingStatistics) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.objective.statistics = statistics

    def trained_domains(self) -> tuple[str, ...]:
        return self.objective.trained_domains()

    @property
    def bare(self) -> Objective:
        return self.objective.bare

    def images(self, x: Tensor, y: Tensor, index: Tensor | None = None) -> Images:
        return self.objective.images(x, y, index)

    def measured(self, images: Images) -> Step:
        return self.objective.measured(images)

    def extra_repr(self) -> str:
        return ""
