"""Evaluation targets in an analysis: through which branch, on which images, under which conditions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import advnorm.attacks as attack_names
from advnorm._core.wrappers import device_of
from advnorm.analysis.batches import attack_images
from advnorm.analysis.settings import require_any
from advnorm.attacks import Attack, AutoAttack
from advnorm.attacks.base import Progress
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.threat import ThreatModel


class BranchView(NamedTuple):
    """A target through one branch, under a name that no other view has."""

    name: str
    target: EvaluationTarget
    route: str | None

    @property
    def conditions(self) -> dict[str, Any]:
        """The conditions of the numbers, for a record."""
        return {**self.target.conditions, "route": self.route, "batch_size": self.target.batch_size}


def branch_views(targets: Iterable[EvaluationTarget], route: str | None) -> list[BranchView]:
    """Return every target through the given branch, else through each branch that its norms treat differently."""
    views: list[BranchView] = []
    for target in targets:
        routes = (route,) if route is not None else branches(target.model) or (None,)
        for branch in routes:
            label = f"{target.name} ({branch})" if len(routes) > 1 else target.name
            taken = {view.name for view in views}
            name = next(n for n in (label, *(f"{label} #{k}" for k in range(2, len(views) + 3))) if n not in taken)
            views.append(BranchView(name, target, branch))
    require_any(views, "targets", "one training run")
    return views


def view_conditions(views: Iterable[BranchView]) -> dict[str, Any]:
    """Return the conditions of each view by its name."""
    return {view.name: view.conditions for view in views}


def default_branch(model: nn.Module, route: str | None = None) -> str | None:
    """Return the branch for attacks: the given one, else ``adv``, else the last; None for a model without branches."""
    known = branches(model)
    if route is not None or not known:
        return route
    return "adv" if "adv" in known else known[-1]


def create_attack(name: str, device: torch.device, *, threat: ThreatModel, seed: int) -> Attack:
    """Return an attack by name. On a GPU ``autoattack`` searches in bf16, which is many times faster.

    A candidate counts only after a float32 forward, so that the precision does not change the result's validity.
    """
    fast = {"precision": "bf16"} if device.type == "cuda" and name == "autoattack" else {}
    return attack_names.get(name, threat=threat, seed=seed, **fast)


def input_attacks(
    target: EvaluationTarget, names: Sequence[str], *, route: str | None = None
) -> dict[str, Attack | None]:
    """Return the attack that crafts the images of each name, through the branch ``route``.

    ``clean`` has none, ``adv`` is the attack of the target, ``noise`` is uniform noise of the same eps; another name is
    that of an attack, such as ``autoattack``. All use running statistics, because crafting must not change statistics.
    """
    names = [names] if isinstance(names, str) else list(names)
    require_any(names, "inputs", "clean, adv, noise or autoattack")
    attacks: dict[str, Attack | None] = {}
    for name in names:
        attack = target.attack
        if name not in ("clean", "adv"):
            known_as = "noise-uniform" if name == "noise" else name
            attack = create_attack(known_as, device_of(target.model), threat=attack.threat, seed=attack.seed)
        attack = dataclasses.replace(attack, route=default_branch(target.model, route), statistics="running")
        attacks[name] = None if name == "clean" else attack
    return attacks


def craft_inputs(
    target: EvaluationTarget, names: Sequence[str], *, route: str | None = None, progress: Progress | None = None
) -> dict[str, Tensor]:
    """Return the images of a target by name (see :func:`input_attacks`).

    AutoAttack leaves images unchanged that are already misclassified or that resist the attack.
    """
    crafted: dict[str, Tensor] = {}
    data = (target.model, target.images, target.labels)
    for name, attack in input_attacks(target, names, route=route).items():
        if attack is None:
            crafted[name] = target.images
        elif isinstance(attack, AutoAttack):
            attack = dataclasses.replace(attack, progress=progress)
            crafted[name] = attack.evaluate(*data, bar=False).x_adv.cpu()
        else:
            crafted[name] = attack_images(attack, *data, batch_size=target.batch_size, progress=progress)
    return crafted


def target_conditions(
    target: EvaluationTarget, inputs: Sequence[str] = (), *, through: str | None = None, **more: Any
) -> dict[str, Any]:
    """Return the conditions of a finding in JSON's types; ``inputs`` were crafted ``through`` a branch."""
    conditions = {"subject": target.name, **target.conditions, "batch_size": target.batch_size, **more}
    if inputs:
        attacks = input_attacks(target, inputs, route=through)
        conditions |= {
            "inputs": {name: attack and repr(attack) for name, attack in attacks.items()},
            "crafted_through": default_branch(target.model, through),
        }
    return conditions
