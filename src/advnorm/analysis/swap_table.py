"""Accuracy of each branch with default, swapped and re-calibrated statistics (paper A, table 5)."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

from torch import Tensor, nn

from advnorm._core.errors import Problem, raise_problems
from advnorm._core.settings import Setting
from advnorm._core.wrappers import device_of, unwrap_model
from advnorm.analysis.base import Finding, format_percent, register_analysis
from advnorm.analysis.moments import ns_name
from advnorm.analysis.plots import Figure, formula, grouped_bars, legend_below, new_figure
from advnorm.analysis.settings import BatchSize, empty_problems
from advnorm.analysis.targets import craft_inputs, create_attack, target_conditions
from advnorm.attacks import Attack
from advnorm.attacks.base import Progress
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
    """Accuracy of each affine bank with default, swapped and re-calibrated statistics (paper A, table 5)."""

    RECORD = ("analysis", "rows", "conditions")
    analysis = "swap_table"

    rows: tuple[SwapRow, ...]

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        rows = [
            [row.setup, ns_name(*row.ns), f"AP_{row.ap}", *map(format_percent, row.accuracy.values())]
            for row in self.rows
        ]
        return ["setup", "statistics", "affine", *self.rows[0].accuracy], rows

    def draw(self) -> Figure:
        columns = list(self.rows[0].accuracy)
        figure, axes = new_figure(height=1.4 + 0.22 * len(columns) * len(self.rows))
        labels = [f"{row.setup}: {formula(ns_name(*row.ns))}, {formula(f'AP_{row.ap}')}" for row in self.rows]
        series = {name: [100 * row.accuracy[name] for row in self.rows] for name in columns}
        grouped_bars(axes, labels, series, number_format="%.1f")
        axes.set(title="Statistics swapped and re-calibrated", xlabel="accuracy (%)", xlim=(0, 108))
        legend_below(figure, *axes.get_legend_handles_labels())
        return figure


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
    progress: Progress | None = None,
) -> SwapTable:
    """Return the accuracy of each branch with its own, the other branch's and re-calibrated statistics.

    ``attacks`` by name; each runs against every setup. ``x_adv`` are adversarial images for the re-calibration;
    ``calibration`` replaces ``x`` and ``x_adv`` by images of both domains, for example from the training set.
    NS^adv_clean replaces the adversarial branch's statistics by those of clean images under its affine bank.
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
    rows: list[SwapRow] = []

    def evaluate(setup: str, ns: tuple[str, str], ap: str, network: nn.Module, scope: AbstractContextManager) -> None:
        threat = next(iter(attacks.values())).threat
        with scope:
            result = benchmark(network, (x, y), threat, attacks, batch_size=batch_size)
        robust = {name: result.robust_accuracy(name) for name in attacks}
        rows.append(SwapRow(setup, ns, ap, {"clean": result.accuracy(), **robust}))
        if progress is not None:
            progress(len(rows), 3 * len(domains))

    for ap in reversed(domains):
        evaluate("default", (ap, ap), ap, model, route(model, ap))
    for ap in reversed(domains):
        evaluate("swapped", (other[ap], other[ap]), ap, model, pair_banks(model, statistics=other[ap], affine=ap))
    for ap in reversed(domains):
        fresh = copy.deepcopy(unwrap_model(model))
        recalibrate(fresh, images[other[ap]], route=ap, batch_size=batch_size)
        evaluate("re-calibrated", (ap, other[ap]), ap, fresh, route(fresh, ap))
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
    hint = "use dual_bn or dual_stats_bn"
    return [Problem(code="not_supported", message=message, field="model", hint=hint)] if shared else []


@register_analysis("swap_table", summary="accuracy with swapped and re-calibrated statistics", paper="A table 5")
def swap_table_of_run(
    target: EvaluationTarget,
    *,
    attacks: Annotated[Sequence[str], Setting("Attacks by name.")] = ("pgd10",),
    progress: Progress | None = None,
) -> SwapTable:
    """Evaluate a run; the re-calibration uses its test images and the images that its attack crafts."""
    raise_problems(_swap_problems(target.model, ("clean", "adv")), "bad swap table")
    device, how = device_of(target.model), {"threat": target.attack.threat, "seed": target.attack.seed}
    built = {name: create_attack(name, device, **how) for name in attacks}
    x_adv = craft_inputs(target, ("adv",), progress=progress)["adv"]
    data = (target.model, target.images, target.labels)
    found = swap_table(*data, built, x_adv=x_adv, batch_size=target.batch_size, progress=progress)
    return found.under(target_conditions(target, **found.conditions))
