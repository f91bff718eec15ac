"""The configuration of a training run: validated, hashable, and exact in files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from advnorm._core import records
from advnorm._core.errors import ConfigError, Problem, raise_problems
from advnorm._core.settings import Named, convert_fields, convert_options, from_mapping, to_json
from advnorm.attacks import Attack
from advnorm.attacks import get as get_attack
from advnorm.config.fields import TRAINING, AttackConfig, TrainingSettings
from advnorm.config.text import Dumper, apply_overrides
from advnorm.config.validation import ELSEWHERE, WITH_OPTIONS, is_known, option_parameters, setting_problems
from advnorm.data import resolve_source
from advnorm.threat import ThreatModel, parse_length


@dataclass(frozen=True, kw_only=True)
class Config(TrainingSettings):
    """One training run. Making a wrong configuration raises one error that lists every problem.

    ``model``, ``data`` and ``objective`` accept a name, ``Named("trades", beta=6)`` or the mapping
    ``{"name": "trades", "beta": 6}``. The page docs/reference/configuration.md lists every setting.
    """

    def __post_init__(self) -> None:
        problems = [*convert_fields(self), *self._convert_options()]
        invalid = {problem.field.partition(".")[0] for problem in problems}
        raise_problems([*problems, *setting_problems(self, invalid)], "bad configuration")

    def _convert_options(self) -> list[Problem]:
        """Convert the options of named objects to the types of their parameters."""
        problems = []
        for label in WITH_OPTIONS:
            named = getattr(self, label)
            if isinstance(named, Named) and is_known(label, named.name):
                parameters = option_parameters(label, named.name)
                options, found = convert_options(label, parameters, named.options, ELSEWHERE.get(label))
                object.__setattr__(self, label, Named(named.name, **options))
                problems += found
        return problems

    def scaled(self) -> Config:
        """Return the same training with ``budget=1``: epochs, milestones, snapshots and warm-ups multiplied by it."""
        times = self.budget
        counted = ("epochs", "warmup_epochs", "eps_warmup_epochs", "steps_warmup_epochs", "second_pass_warmup_epochs")
        return replace(
            self,
            budget=1,
            milestones=tuple(round(times * milestone, 9) for milestone in self.milestones),
            snapshots=tuple(times * epoch for epoch in self.snapshots),
            **{name: times * getattr(self, name) for name in (*counted, "running_epochs")},
        )

    def build_attack(self, epoch: int | None = None) -> Attack:
        """Return the attack of training in an epoch, counted from 0; without an epoch, after all warm-ups.

        During the first n = ``eps_warmup_epochs`` epochs eps is ``(epoch + 1) / (n + 1)`` of its full length; so are
        the steps with ``steps_warmup_epochs``, rounded up.
        """
        done, whole = _warmup_fraction(self.eps_warmup_epochs, epoch)
        threat = ThreatModel(norm=self.threat, eps=parse_length(self.eps) * (done / whole))
        done, whole = _warmup_fraction(self.steps_warmup_epochs, epoch)
        attack: Any = self.attack.build(threat, seed=self.seed)
        return attack if done == whole else replace(attack, steps=-(-attack.steps * done // whole))

    def build_validation_attack(self) -> Attack:
        """Return the attack on held-out images; ``training`` is the attack of training after all warm-ups."""
        if self.validation_attack == TRAINING:
            return self.build_attack()
        return get_attack(self.validation_attack, threat=ThreatModel(norm=self.threat, eps=self.eps), seed=self.seed)

    @property
    def digest(self) -> str:
        """A hash of every setting except name and seed, so that seeds share it; ``"8/255"`` counts as its number."""
        content = self.to_dict()
        del content["name"], content["seed"]
        added_later = ("snapshots", "accumulate", "recompute", "parallel", "monitor", "monitor_attack")
        for name in (*added_later, "second_pass_warmup_epochs"):
            if content.get(name) == to_json(getattr(Config, name, None)):
                content.pop(name, None)
        if self.attack.name == "pgd":
            del content["attack"]["name"], content["attack"]["options"]
        content["eps"] = parse_length(self.eps)
        if self.attack.step_size is not None:
            content["attack"]["step_size"] = parse_length(self.attack.step_size)
        return records.digest(json.dumps(content, sort_keys=True))

    @property
    def run_name(self) -> str:
        """The given name, or one made from the main settings and the digest."""
        if self.name is not None:
            return self.name
        eps = self.eps if isinstance(self.eps, str) else f"{self.eps:g}"
        length = f"eps{eps.strip()}" if self.threat == "Linf" else f"{self.threat}_{eps}"
        length = re.sub(r"[^A-Za-z0-9.]+", "_", length)
        data, place = resolve_source(self.data.name)
        if data in ("imagefolder", "arrays"):  # the name of the folder or file tells the data sets of a user apart
            data = re.sub(r"[^\w.-]+", "_", Path(str(place)).stem, flags=re.ASCII).strip("._")[:40] or data
        model = re.sub(r"[^\w.-]+", "_", self.model.name)
        norm = self.norm if isinstance(self.norm, str) else "+".join(dict.fromkeys(norm for _, norm in self.norm))
        return "-".join((data, model, norm, self.objective.name, length, self.digest[:8]))

    def to_dict(self) -> dict[str, Any]:
        """Return the settings in JSON types; :meth:`from_dict` gives the same configuration back, exactly."""
        return {f.name: to_json(getattr(self, f.name)) for f in fields(self)}

    def to_yaml(self) -> str:
        """Return the text of a file for :func:`load_config`."""
        return yaml.dump(self.to_dict(), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any], overrides: Sequence[str] = ()) -> Config:
        """Build a configuration from plain data and ``key=value`` overrides; other settings have their defaults.

        If an override changes ``epochs`` and none sets milestones or snapshots, these keep their share of the run.
        """
        if not isinstance(settings, Mapping):
            words = "a configuration must be a mapping of settings"
            raise ConfigError("wrong_type", words, got=settings, hint="write key: value")
        changed, problems = apply_overrides(settings, overrides, _PART_DEFAULTS)
        before, now = (given.get("epochs", cls.epochs) for given in (settings, changed))
        scaled = {"milestones": lambda at: round(at, 4), "snapshots": lambda at: max(1, round(at))}
        for name, rounded in scaled.items() if now != before else ():
            values = changed.get(name)
            if values and values is settings.get(name):  # not set by an override
                with suppress(TypeError, ValueError, ZeroDivisionError):  # reported with the other problems
                    changed[name] = list(dict.fromkeys(rounded(value * now / before) for value in values))
        return from_mapping(cls, changed, problems)

    def with_overrides(self, overrides: Sequence[str]) -> Config:
        """Return a changed configuration: ``config.with_overrides(["attack.steps=20", "eps=16/255"])``."""
        return self.from_dict(self.to_dict(), overrides)


#: Settings whose parts can be overridden one by one, as ``attack.steps=20``, with their defaults.
_PART_DEFAULTS: dict[str, Any] = {
    "norm_options": {},
    "regularizer": {},
    "second_pass": {},
    **{f.name: to_json(f.default) for f in fields(Config) if isinstance(f.default, Named | AttackConfig)},
}


def _warmup_fraction(epochs: int, epoch: int | None) -> tuple[int, int]:
    """The fraction of the full strength in an epoch: numerator and denominator."""
    return (1, 1) if epoch is None or epoch >= epochs else (epoch + 1, epochs + 1)
