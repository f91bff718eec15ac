"""Images of an analysis: batch by batch, their predicted classes, and those that the attacks of a run craft."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from advnorm._core.precision import float32_as
from advnorm._core.registry import keywords
from advnorm._core.wrappers import device_of
from advnorm.analysis.settings import Inputs, RouteSetting, require_any
from advnorm.attacks import Attack, predicting
from advnorm.attacks.autoattack import CascadeAttack
from advnorm.attacks.base import Progress
from advnorm.attacks.names import get as get_attack
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.threat import ThreatModel

T = TypeVar("T")
#: Images as one tensor, or batch by batch: tensors, or tuples whose first entry is the images.
Images = Tensor | Iterable[Any]


@dataclass
class _Reporter:
    """Passes the progress of loops on; ``outer`` has finished steps and steps of the loops around the present one."""

    progress: Progress
    outer: list[tuple[int, int]] = field(default_factory=list)

    def report(self, done: float, total: int) -> None:
        for before, steps in reversed(self.outer):
            done, total = before + done / total, steps
        self.progress(done, total)


REPORTER: ContextVar[_Reporter | None] = ContextVar("reporter", default=None)


@contextmanager
def reporting_progress(progress: Progress | None) -> Iterator[None]:
    """Scope: the loops of analyses call ``progress`` with the amount of finished work and the total amount.

    A loop inside another one reports fractions of a step of the outer one. With None, an enclosing scope stays in
    effect.
    """
    token = REPORTER.set(REPORTER.get() if progress is None else _Reporter(progress))
    try:
        yield
    finally:
        REPORTER.reset(token)


def track(items: Iterable[T]) -> Iterator[T]:
    """Yield the items and report after each one how many are done."""
    items, reporter = list(items), REPORTER.get()
    if reporter is None:
        yield from items
        return
    depth = len(reporter.outer)
    for done, item in enumerate(items):
        reporter.outer[depth:] = [(done, len(items))]
        yield item
        del reporter.outer[depth:]
        reporter.report(done + 1, len(items))


def even_slices(count: int, size: int) -> Iterator[slice]:
    """Yield slices of at most ``size`` images whose lengths differ by at most one.

    A short last batch would have unusual statistics.
    """
    parts = -(-count // size)
    for part in range(parts):
        yield slice(part * count // parts, (part + 1) * count // parts)


def iterate_batches(x: Images, batch_size: int) -> Iterator[Tensor]:
    """Yield images batch by batch: slices of a tensor, or the batches of an iterable."""
    for batch in (x[rows] for rows in even_slices(len(x), batch_size)) if isinstance(x, Tensor) else x:
        yield batch[0] if isinstance(batch, tuple | list) else batch


def attack_images(attack: Attack, model: nn.Module, x: Tensor, y: Tensor, *, batch_size: int) -> Tensor:
    """Return adversarial images, on the CPU; the position of an image determines its random numbers."""
    device, parts = device_of(model), []
    for rows in track(even_slices(len(x), batch_size)):
        index = torch.arange(rows.start, rows.stop)
        parts.append(attack(model, x[rows].to(device), y[rows].to(device), index=index).cpu())
    return torch.cat(parts)


def predict_classes(model: nn.Module, images: Tensor, *, batch_size: int = 256, **through: Any) -> Tensor:
    """Return the predicted class of each image, in eval mode and strict float32, on the CPU.

    ``through``: route and statistics, as in :func:`advnorm.attacks.predicting`.
    """
    device, classes = device_of(model), []
    with predicting(model, **through) as predict, torch.no_grad(), float32_as("ieee", device):
        for rows in even_slices(len(images), batch_size):
            classes.append(predict(images[rows].to(device)).argmax(1).cpu())
    return torch.cat(classes)


def measure_accuracy(model: nn.Module, images: Tensor, labels: Tensor, **settings: Any) -> float:
    """Return the share of the images whose predicted class is their label."""
    return float((predict_classes(model, images, **settings) == labels.cpu()).double().mean())


# -- images of a run ---------------------------------------------------------------------------------------------------


def default_branch(model: nn.Module, route: str | None = None) -> str | None:
    """Return the branch for attacks: the given one, else ``adv``, else the last; None for a model without branches."""
    known = branches(model)
    if route is not None or not known:
        return route
    return "adv" if "adv" in known else known[-1]


def create_attack(name: str, device: torch.device, *, threat: ThreatModel, seed: int) -> Attack:
    """Return an attack by name. On a GPU ``autoattack`` and ``quick`` search in bf16, which is faster.

    A candidate counts only after a float32 forward, so that the precision does not change the result's validity.
    """
    fast = {"precision": "bf16"} if device.type == "cuda" and name in ("autoattack", "quick") else {}
    return get_attack(name, threat=threat, seed=seed, **fast)


def input_attacks(
    target: EvaluationTarget, names: Sequence[str], *, route: str | None = None
) -> dict[str, Attack | None]:
    """Return the attack that crafts the images of each name, through the branch ``route``.

    ``clean`` has none, ``adv`` is the attack of the target, ``noise`` is uniform noise of the same eps; another name is
    that of an attack, such as ``autoattack``. All use running statistics, because crafting must not change statistics.
    """
    require_any(names, "inputs", "clean, adv, noise or autoattack")
    attacks: dict[str, Attack | None] = {}
    for name in names:
        attack = target.attack
        if name not in ("clean", "adv"):
            known_as = "noise-uniform" if name == "noise" else name
            attack = create_attack(known_as, device_of(target.model), threat=attack.threat, seed=attack.seed)
        attack = replace(attack, route=default_branch(target.model, route), statistics="running")
        attacks[name] = None if name == "clean" else attack
    return attacks


def craft_inputs(target: EvaluationTarget, names: Sequence[str], *, route: str | None = None) -> dict[str, Tensor]:
    """Return the images of a target by name (see :func:`input_attacks`).

    AutoAttack leaves images unchanged that are already misclassified or that resist the attack.
    """
    crafted: dict[str, Tensor] = {}
    data = (target.model, target.images, target.labels)
    reporter = REPORTER.get()
    for name, attack in input_attacks(target, names, route=route).items():
        if attack is None:
            crafted[name] = target.images
        elif isinstance(attack, CascadeAttack):
            attack = replace(attack, progress=reporter and reporter.report)
            crafted[name] = attack.evaluate(*data, bar=False).x_adv.cpu()
        else:
            crafted[name] = attack_images(attack, *data, batch_size=target.batch_size)
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


def measure_images(
    measure: Callable[..., Any],
    target: EvaluationTarget,
    *,
    inputs: Inputs = ("clean", "adv"),
    route: RouteSetting = None,
    **how: Any,
) -> Any:
    """Return the finding of ``measure(model, images, **how)`` on crafted images of a target, with its conditions.

    A measurement with a route uses the branch of the attacks. One with ``samples`` needs no more images of each kind.
    """
    branch, known = default_branch(target.model, route), keywords(measure)
    count = how.get("samples", known["samples"].default) if "samples" in known else None
    few = replace(target, data=(target.images[:count], target.labels[:count]))
    how |= {"batch_size": target.batch_size} | ({"route": branch} if "route" in known else {})
    found = measure(target.model, craft_inputs(few, inputs, route=branch), **how)
    return found.under(target_conditions(target, inputs, through=branch, **found.conditions))
