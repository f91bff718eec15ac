"""The jobs of an evaluation: one for each attack and branch."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from advnorm._core.errors import ConfigError, Problem, collect_problems
from advnorm.attacks import Attack
from advnorm.attacks.names import get as get_attack
from advnorm.norms import Mode, frozen_mode
from advnorm.threat import ThreatModel

#: Attacks by name, as instances, or as instances under names of the caller.
Attacks = str | Attack | Sequence[str | Attack] | Mapping[str, Attack]
#: Other entries of a result; an attack cannot have these names.
RESERVED_NAMES = ("clean", "union")


@dataclass(frozen=True, kw_only=True)
class AttackJob:
    """One attack, evaluated through one branch."""

    name: str
    attack: Attack
    route: str | None
    origin: str = ""  # fingerprint of the model on which the attack is computed, if that is another model

    @property
    def key(self) -> str:
        """The job's name in a partial record."""
        return " | ".join([str(self.route), repr(self.attack), *([self.origin] if self.origin else [])])


def build_jobs(
    attacks: Attacks,
    threat: ThreatModel,
    routes: Sequence[str | None],
    *,
    seed: int,
    statistics: Mode,
    any_threat: bool = False,
) -> tuple[list[AttackJob], list[Problem]]:
    """Build a job for each attack and route. An attack with a route of its own is computed through that branch."""
    jobs: list[AttackJob] = []
    problems: list[Problem] = []

    named = name_attacks(attacks)
    if not named:
        hint = "name some, for example attacks=('pgd10', 'autoattack')"
        problems.append(Problem(code="empty", message="no attack given", field="attacks", hint=hint))
    for name, attack in named.items():
        with collect_problems(problems):
            if name in RESERVED_NAMES:
                message = f"an attack cannot be called {name!r}, which is a column of the result"
                raise ConfigError("conflict", message, field="attacks")
            if isinstance(attack, str):
                attack = get_attack(attack, threat=threat, seed=seed, statistics=frozen_mode(statistics))
            elif not isinstance(attack, Attack):
                raise ConfigError("wrong_type", "an attack must be a name or an Attack", field="attacks", got=attack)
            elif not any_threat and attack.threat != threat:
                message = f"attack {name!r} has the threat model {attack.threat}, the evaluation {threat}"
                raise ConfigError("conflict", message, field="attacks")
            attack = dataclasses.replace(attack, statistics=frozen_mode(attack.statistics))
            for route in routes:
                chosen = attack if attack.route is not None else dataclasses.replace(attack, route=route)
                jobs.append(AttackJob(name=name, attack=chosen, route=route))
    return jobs, problems


def name_attacks(attacks: Attacks) -> dict[str, str | Attack]:
    """Return the attacks by name; an instance without a name gets an unused name."""
    if isinstance(attacks, Mapping):
        return dict(attacks)
    listed = [attacks] if isinstance(attacks, str | Attack) or not isinstance(attacks, Iterable) else [*attacks]
    taken = {attack for attack in listed if isinstance(attack, str)}
    named: dict[str, str | Attack] = {}
    for attack in listed:
        named[attack if isinstance(attack, str) else _unused_name(attack, taken | set(named))] = attack
    return named


def _unused_name(attack: Attack, taken: Collection[str]) -> str:
    """Name an attack by class, steps and changed settings: ``pgd3 momentum=0.5``; numbered if that is ``taken``."""
    shared = ("steps", *(f.name for f in dataclasses.fields(Attack)))
    own = [f for f in dataclasses.fields(attack) if f.name not in shared] if isinstance(attack, Attack) else []
    values = {f.name: (getattr(attack, f.name), f.default) for f in own}
    plain = {key: pair for key, pair in values.items() if isinstance(pair[0], str | int | float | None)}
    changed = [f"{key}={value}" for key, (value, default) in plain.items() if value != default]
    name = " ".join([type(attack).__name__.lower() + str(getattr(attack, "steps", "")), *changed])
    return next(n for n in (name, *(f"{name} ({i})" for i in range(2, len(taken) + 3))) if n not in taken)
