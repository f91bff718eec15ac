"""Monitor training: warn if a strong attack leaves far less accuracy than PGD-10 or the training attack."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from torch import nn

from advnorm.config import Config
from advnorm.objectives import OBJECTIVES
from advnorm.training.validation import Validation

#: A larger gap is suspicious if the strong attack leaves a smaller ratio. On CIFAR-10 at 16/255, AutoAttack leaves 0.20
#: to 0.22 of the PGD-10 accuracy of paper A's single BN. All other networks of papers A and C with such a gap keep at
#: least 0.41.
GAP, RATIO = 0.1, 0.3
#: Slack, in images.
SLACK = 2


class Monitor:
    """Accuracies of the same held-out images under the training attack, PGD-10 and a strong attack."""

    def __init__(self, config: Config, validation: Callable[[Config], Validation]) -> None:
        """``validation`` builds the validation of a configuration, which needs no clean images."""
        names = ["pgd10", config.monitor_attack]
        if OBJECTIVES.get(config.objective.name).needs_attack:
            names.insert(0, "training")
        self.strong = config.monitor_attack
        self.validations = {
            name: validation(dataclasses.replace(config, validation_attack=name, validation_images=config.monitor))
            for name in dict.fromkeys(names)
        }

    def __call__(self, model: nn.Module, stopped: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        """Accuracies by attack, and ``alarm``, 1 or 0; None if ``stopped`` returned True."""
        found: dict[str, float] = {}
        for name, validation in self.validations.items():
            accuracy = validation(model, stopped)
            if accuracy is None:
                return None
            found[name] = accuracy[name]
        return {**found, "alarm": float(self.warning(found) is not None)}

    def warning(self, found: Mapping[str, float]) -> str | None:
        """Return the warning of an epoch; None if nothing is suspicious."""
        return describe_alarm(found, self.strong, self.validations[self.strong].images)


def describe_alarm(found: Mapping[str, float], strong: str, images: int) -> str | None:
    """Describe a suspicious gap between accuracies by attack; None if there is none."""
    least = found[strong] + SLACK / images
    kinds = {
        "pgd10": ("false robustness", "PGD-10", "use dual norms, a KL term, or a smaller eps, and run `advnorm audit`"),
        "training": (
            "catastrophic overfitting",
            "the training attack",
            "train with more attack steps or random starts",
        ),
    }
    for name, (kind, words, advice) in kinds.items():
        claimed = found.get(name, 0.0)
        if claimed - least > GAP and least < RATIO * claimed:
            numbers = f"accuracy is {claimed:.1%} under {words}, {found[strong]:.1%} under {strong} ({images} images)"
            return f"{kind}: {numbers}; {advice}"
    return None
