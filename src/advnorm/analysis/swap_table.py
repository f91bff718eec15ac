"""Accuracy of each branch with default, swapped, re-calibrated and re-estimated statistics (paper A, table 5)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any, NamedTuple

from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.base import Finding, TableData, format_percent, register_analysis
from advnorm.analysis.images import craft_inputs, create_attack, target_conditions, track
from advnorm.analysis.moments import ns_name
from advnorm.analysis.plots import Figure, bar_figure, formula
from advnorm.analysis.settings import BatchSize, empty_problems
from advnorm.attacks import Attack
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.target import EvaluationTarget
from advnorm.norms import RoutedNorm, pair_banks, recalibrate, route, routed_modules


class SwapRow(NamedTuple):
    """Accuracy with the statistics ``ns`` (affine bank, images) and the affine bank ``ap``."""

    setup: str
    ns: tuple[str, str]
    ap: str
    accuracy: Mapping[str, float]  # clean, and by attack

    def record(self) -> dict[str, Any]:
        """Return the row in JSON's types."""
        return {"setup": self.setup, "NS": dict(zip(("under", "of"), self.ns)), "AP": self.ap, **self.accuracy}


@dataclass(frozen=True, kw_only=True, eq=False)
class SwapTable(Finding):
    """Accuracy of each affine bank with default, swapped, re-calibrated and re-estimated statistics (A, table 5)."""

    RECORD = ("analysis", "rows", "conditions")
    analysis = "swap_table"

    rows: tuple[SwapRow, ...]

    def table(self) -> TableData:
        rows = [
            [row.setup, ns_name(*row.ns), f"AP_{row.ap}", *map(format_percent, row.accuracy.values())]
            for row in self.rows
        ]
        return ["setup", "statistics", "affine", *self.rows[0].accuracy], rows

    def draw(self) -> Figure:
        labels = [f"{row.setup}: {formula(ns_name(*row.ns))}, {formula(f'AP_{row.ap}')}" for row in self.rows]
        series = {name: [100 * row.accuracy[name] for row in self.rows] for name in self.rows[0].accuracy}
        words = {"title": "Statistics swapped and re-calibrated", "xlabel": "accuracy (%)"}
        return bar_figure(labels, series, number_format="%.1f", xlim=(0, 108), **words)


def swap_table(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    attacks: Mapping[str, Attack],
    *,
    x_adv: Tensor,
    calibration: Mapping[str, Tensor] | None = None,
    domains: tuple[str, str] = ("clean", "adv"),
    batch_size: BatchSize = 256,
) -> SwapTable:
    """Return the accuracy of each branch with its own, the other branch's, re-calibrated and re-estimated statistics.

    ``attacks`` by name; each runs against every setup. ``x_adv`` are adversarial images for the re-calibration;
    ``calibration`` replaces ``x`` and ``x_adv`` by images of both domains, for example from the training set.
    NS^adv_clean replaces the adversarial branch's statistics by those of clean images under its affine bank. The
    ``control`` re-estimates a branch's statistics on its own images in the same way. So it differs from the
    re-calibration in the images only, while the default differs also in the estimate: running averages over training.
    """
    problems = _swap_problems(model, domains)
    problems += empty_problems(attacks, "attacks", "{'pgd10': PGD(...)}")
    problems += [
        Problem(code="conflict", message=f"the attack {name!r} must not have its own route", field="attacks")
        for name in attacks
        if attacks[name].route
    ]
    raise_problems(problems, "bad swap table")
    images = dict(calibration or zip(domains, (x, x_adv)))
    other = dict(zip(domains, reversed(domains)))
    threat = next(iter(attacks.values())).threat
    rows: list[SwapRow] = []
    for setup, ap in track(product(("default", "swapped", "re-calibrated", "control"), reversed(domains))):
        network, ns = model, (ap, ap)
        if setup == "swapped":
            ns = (other[ap], other[ap])
        elif setup != "default":
            source = other[ap] if setup == "re-calibrated" else ap
            network, ns = copy.deepcopy(unwrap_model(model)), (ap, source)
            recalibrate(network, images[source], route=ap, batch_size=batch_size)
        with pair_banks(network, statistics=other[ap], affine=ap) if setup == "swapped" else route(network, ap):
            result = benchmark(network, (x, y), threat, attacks, batch_size=batch_size)
        robust = {name: result.robust_accuracy(name) for name in attacks}
        rows.append(SwapRow(setup, ns, ap, {"clean": result.accuracy(), **robust}))
    conditions = {"attacks": {name: repr(attack) for name, attack in attacks.items()}, "images": len(x)}
    return SwapTable(rows=tuple(rows), conditions={**conditions, "re-calibrated_on": len(images[domains[0]])})


def _swap_problems(model: nn.Module, domains: tuple[str, str]) -> list[Problem]:
    """Return why the statistics of two domains cannot be swapped; each domain needs a bank that it alone updates."""
    known = branches(model)
    if not set(domains) <= set(known):
        message = f"the model must have the branches {' and '.join(domains)}"
        hint = f"it has {', '.join(known)}" if known else "it has none; a norm with branches is dual_bn"
        return [Problem(code="wrong_route", message=message, field="domains", hint=hint)]
    plans = dict.fromkeys(module.plan for module in routed_modules(model).values() if isinstance(module, RoutedNorm))
    shared = [
        plan.name
        for plan in plans
        if plan.statistics != "batch" or plan.crosses or len({plan.feeds[plan.index(d)] for d in domains}) < 2
    ]
    message = f"{', '.join(shared)} does not normalize each branch by statistics of its own images"
    return [Problem("not_supported", message, "model", hint="use dual_bn or dual_stats_bn")] if shared else []


@register_analysis("swap_table", summary="accuracy with swapped and re-calibrated statistics", paper="A table 5")
def swap_table_of_run(
    target: EvaluationTarget, *, attacks: Annotated[Sequence[str], Setting("Attacks by name.")] = ("pgd10",)
) -> SwapTable:
    """Evaluate a run; the re-calibration uses its test images and the images that its attack crafts."""
    raise_problems(_swap_problems(target.model, ("clean", "adv")), "bad swap table")
    device, how = device_of(target.model), {"threat": target.attack.threat, "seed": target.attack.seed}
    built = {name: create_attack(name, device, **how) for name in attacks}
    x_adv = craft_inputs(target, ("adv",))["adv"]
    data = (target.model, target.images, target.labels)
    found = swap_table(*data, built, x_adv=x_adv, batch_size=target.batch_size)
    return found.under(target_conditions(target, **found.conditions))
