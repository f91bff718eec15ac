"""The paired difference of two evaluations: the same images, two networks, branches, attacks or protocols."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.records import read_json
from advnorm.evaluation.intervals import accuracy_interval, format_accuracy, mcnemar_p_value, paired_interval
from advnorm.evaluation.outcomes import CELL_FORMAT, DEFAULT_ROUTE, read_cell_outcomes
from advnorm.evaluation.results import BenchmarkResult, label_of, render_table

if TYPE_CHECKING:
    from rich.table import Table

Evaluated: TypeAlias = BenchmarkResult | Path | str
#: Results per image by route and attack, and the rows of the images.
_Outcomes: TypeAlias = tuple[str, Tensor, dict[str, dict[str, Tensor]]]
FORMAT = "advnorm.comparison/1"
METHOD = (
    "95 % intervals: Wilson for accuracies; for differences Wald with half an observation added to each outcome of a "
    "pair (Agresti and Min 2005). p: exact McNemar test."
)


@dataclass(frozen=True, kw_only=True)
class PairedDifference:
    """Two accuracies on the same images, and their difference; fractions.

    With several records a side (seeds), an image counts with its mean, ``spreads`` are the standard deviations of the
    accuracies over the records, and there is no p-value.
    """

    first: str
    second: str
    images: int
    records: tuple[int, int]
    accuracies: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    spreads: tuple[float | None, float | None]
    difference: float
    low: float
    high: float
    #: Images that only one side classifies correctly.
    only_first: int | None
    only_second: int | None
    p_value: float | None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Paired differences, first minus second, one for each route and attack."""

    rows: tuple[PairedDifference, ...]

    def table(self) -> Table:
        """Return a table for the terminal."""
        from rich.table import Table

        title = f"branch and attack of each side; paired difference on {self.rows[0].images} common images, percent"
        table = Table(title=title, title_justify="left", caption=METHOD, caption_justify="left")
        for label in ("first", "second", "accuracies", "", "difference", "p"):
            table.add_column(label, justify="left" if label in ("first", "second") else "right")
        for row in self.rows:
            difference = f"{100 * row.difference:+.1f} ({100 * row.low:+.1f} to {100 * row.high:+.1f})"
            shown = [
                format_accuracy(accuracy, row.images) + ("" if spread is None else f" ± {100 * spread:.1f}")
                for accuracy, spread in zip(row.accuracies, row.spreads)
            ]
            p_value = "" if row.p_value is None else f"{row.p_value:.2g}"
            table.add_row(row.first, row.second, *shown, difference.replace("-", "−"), p_value)
        return table

    def __str__(self) -> str:
        return render_table(self.table())

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"format": FORMAT, "method": METHOD, "rows": [asdict(row) for row in self.rows]}


def compare(
    first: Evaluated | Sequence[Evaluated],
    second: Evaluated | Sequence[Evaluated] | None = None,
    *,
    attack: str | tuple[str, str] | None = None,
    route: str | tuple[str, str] | None = None,
) -> Comparison:
    """Compare two evaluations, or two branches or attacks of one, on the images that they share.

    ``first`` and ``second``: results, or records of evaluations and of cells of studies; several are seeds. Without
    ``second``, the two routes or attacks of ``first`` are compared. ``attack``: ``"clean"`` or the name of an attack,
    for each side if they differ; by default all that both sides have, and the same for ``route``. A network without
    branches has its ``default`` route on either side.
    """
    sides = [_load_side(side) for side in (first, first if second is None else second)]
    routes, attacks = (value if isinstance(value, tuple) else (value, value) for value in (route, attack))
    if second is None and routes[0] == routes[1] and attacks[0] == attacks[1]:
        message, hint = "one evaluation has nothing to compare with", "name two routes or two attacks"
        raise ConfigError("missing_record", message, field="second", hint=hint)
    rows = _common_rows([one for side in sides for one in side])
    pairs = _pairs([side[0][2] for side in sides], routes, attacks)
    return Comparison(rows=tuple(_difference(sides, rows, *pair) for pair in pairs))


def _load_side(side: Evaluated | Sequence[Evaluated]) -> list[_Outcomes]:
    several = [side] if isinstance(side, BenchmarkResult | Path | str) else list(side)
    return [_load(one) for one in several]


def _load(one: Evaluated) -> _Outcomes:
    """Return the results per image of an evaluation or of a study's cell, after the checks of its loader."""
    if not isinstance(one, BenchmarkResult):
        if Path(one).is_dir():
            records = ", ".join(sorted(path.name for path in Path(one).glob("evaluation-*.json")))
            hint = f"name a record in it: {records}" if records else f"advnorm evaluate {one} writes a record into it"
            raise ConfigError("wrong_type", f"{one} is a folder", field="records", hint=hint)
        record = read_json(Path(one))
        if record.get("format") == CELL_FORMAT:
            return read_cell_outcomes(record, one)
        one = BenchmarkResult.from_record(record, one)
    return (one.conditions.get("about") or {}).get("data") or "", one.rows, one.outcomes


def _common_rows(loaded: Sequence[_Outcomes]) -> Tensor:
    names = {name.partition(",")[0] for name, _, _ in loaded if name}
    rows = loaded[0][1]
    for _, others, _ in loaded[1:]:
        rows = rows[torch.isin(rows, others)]
    problems: list[Problem] = []
    if len(names) > 1:
        message = "the evaluations must use the same data set"
        problems.append(Problem(code="conflict", message=message, field="data", got=", ".join(sorted(names))))
    if not len(rows):
        problems.append(Problem(code="empty", message="the evaluations have no image in common", field="rows"))
    raise_problems(problems, "cannot compare")
    return rows


def _pairs(
    sides: Sequence[dict[str, dict[str, Tensor]]],
    routes: tuple[str | None, str | None],
    attacks: tuple[str | None, str | None],
) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return the routes and attacks to compare, as two addresses each."""
    first, second = sides
    if routes[0] == routes[1] and (routes[0] in first) != (routes[1] in second):
        # A branch for both sides, one of which has a single norm and thus no branches.
        one, other = (DEFAULT_ROUTE if [*side] == [DEFAULT_ROUTE] else route for side, route in zip(sides, routes))
        routes = one, other
    problems = [
        unknown_name("route", route, side)
        for side, route in zip(sides, routes)
        if route is not None and route not in side
    ]
    raise_problems(dict.fromkeys(problems))
    if routes == (None, None):
        one_each = len(first) == len(second) == 1  # their names may differ: "default" and "shared"
        common = (
            [(next(iter(first)), next(iter(second)))]
            if one_each
            else [(name, name) for name in first if name in second]
        )
    else:
        common = [(one or next(iter(first)), other or next(iter(second))) for one, other in [routes]]
    found: list[tuple[tuple[str, str], tuple[str, str]]] = []
    for one, other in common:
        known = first[one], second[other]
        if attacks == (None, None):
            found += [((one, name), (other, name)) for name in known[0] if name in known[1]]
            continue
        problems = [unknown_name("attack", name, side) for name, side in zip(attacks, known) if name not in side]
        raise_problems(dict.fromkeys(problems))
        found.append(((one, str(attacks[0])), (other, str(attacks[1]))))
    if not found:
        message = "the evaluations have no route and attack in common: "
        message += f"the first has the routes {', '.join(first)}, the second {', '.join(second)}"
        hint = f"name one for each side: --route {[*first][-1]} {[*second][-1]}"
        raise ConfigError("empty", message, field="route", hint=hint if first.keys() != second.keys() else "")
    return found


def _difference(
    sides: Sequence[Sequence[_Outcomes]], rows: Tensor, first: tuple[str, str], second: tuple[str, str]
) -> PairedDifference:
    means: list[Tensor] = []
    spreads: list[float | None] = []
    for side, (route, attack) in zip(sides, (first, second)):
        problems = [
            unknown_name("attack", attack, found.get(route, {}))
            for _, _, found in side
            if attack not in found.get(route, {})
        ]
        raise_problems(problems)
        results = torch.stack([_at_rows(found[route][attack], own, rows) for _, own, found in side]).double()
        means.append(results.mean(0))
        accuracies = results.mean(1).tolist()
        spreads.append(statistics.stdev(accuracies) if len(accuracies) > 1 else None)
    gaps, n = means[0] - means[1], len(rows)
    one, other = (mean.mean().item() for mean in means)
    low, high = paired_interval(gaps.sum().item(), gaps.square().sum().item(), n)
    single = all(len(side) == 1 for side in sides)
    only_first, only_second = (int((gaps == sign).sum()) if single else None for sign in (1, -1))
    return PairedDifference(
        first=f"{label_of(first[0])}, {first[1]}",
        second=f"{label_of(second[0])}, {second[1]}",
        images=n,
        records=(len(sides[0]), len(sides[1])),
        accuracies=(one, other),
        intervals=(accuracy_interval(one, n), accuracy_interval(other, n)),
        spreads=(spreads[0], spreads[1]),
        difference=one - other,
        low=low,
        high=high,
        only_first=only_first,
        only_second=only_second,
        p_value=None if only_first is None or only_second is None else mcnemar_p_value(only_first, only_second),
    )


def _at_rows(results: Tensor, own: Tensor, rows: Tensor) -> Tensor:
    """Return the results of the images in ``rows``, in their order."""
    order = own.argsort()
    return results[order[torch.searchsorted(own[order], rows)]]
