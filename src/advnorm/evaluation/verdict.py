"""The verdict of an audit: how the evidence is weighed, and what was found as table, record and figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from advnorm._core.errors import ConfigError, Problem, did_you_mean, raise_all
from advnorm._core.exit_codes import VERDICTS
from advnorm._core.records import read_json, writable_problems
from advnorm.evaluation.results import rendered, told_about
from advnorm.threat import Norm, ThreatModel

if TYPE_CHECKING:
    from rich.table import Table

Word = Literal["real", "false", "inconclusive", "none"]
Weight = Literal["decides", "doubt", "note"]

#: Exit status of the command; 2 is a usage error.

# Thresholds. Pairs PGD-10 → AutoAttack that the papers print (A tables 1 to 8, C tables 1, 3 and 4). Sound models keep
# 0.46 to 0.94 of PGD-10 and lose at most 14.3 points; falsely robust ones keep at most 0.14 and lose at least 21.9.

#: A smaller gap is no sign of anything: sound models at eps 8/255 lose 3 to 7 points.
GAP_POINTS = 8.0
#: Less than this share of PGD-10 left in the worst case: false. Halfway between 0.14 and 0.46.
FALSE_RATIO = 0.3
#: A gap that no sound model of the papers has, where little more than half is left: false.
FALSE_POINTS, FALSE_POINTS_RATIO = 20.0, 0.6
#: Where so many images have no gradient PGD-10 has measured nothing; a gap that no sound model has is then enough.
BLIND_SHARE, BLIND_POINTS = 0.5, 15.0
#: Below it a gap is a doubt, and with any other doubt false; sound models at eps 16/255 go down to 0.46.
DOUBT_RATIO = 0.5
#: PGD-10 accuracy up to which nobody claims robustness: undefended models have 0 to 2 %.
NONE_CLAIMED = 0.10
#: ... and worst-case accuracy that goes with it, unless chance is more.
NONE_LEFT = 0.05
#: So many images more that withstood everything turn no gap into a sign.
SLACK_IMAGES = 2
#: Fewer images decide nothing: 95 % of the time an accuracy is then 18 points off or less.
LEAST_IMAGES = 30

#: How a Gaussian of a mixture norm that is judged alone is called.
FIXED = "fixed "


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One measurement: what it came to, what was expected, and what it weighs when it is not as expected.

    ``decides``: the robustness is false. ``doubt``: it cannot be called real. ``note``: to know.
    """

    name: str
    value: float
    expected: str
    ok: bool
    weight: Weight
    text: str


@dataclass(frozen=True, kw_only=True)
class Step:
    """A rung as it went: accuracy under this attack where it ran on all images, and the worst case so far."""

    attack: str
    text: str
    alone: float | None
    worst: float
    skipped: str = ""


def weigh_gap(
    claimed: float,
    worst: float,
    evidence: Sequence[Evidence] = (),
    *,
    norm: Norm = "Linf",
    images: int | None = None,
) -> Evidence:
    """How far the worst case is below PGD-10, and what that weighs beside the other ``evidence``.

    Of few ``images`` two more that withstood everything must not change it.
    Under L1 it decides nothing by itself: PGD is so weak there that it leaves 35 % of a linear model's images, of which
    the adaptive attacks leave 1 %.
    """
    shown, share = 100 * (claimed - worst), worst / claimed if claimed else 1.0
    least = min(claimed, (round(worst * images) + SLACK_IMAGES) / images) if images else worst
    points, left = 100 * (claimed - least), least / claimed if claimed else 1.0
    false = left < FALSE_RATIO or (points > FALSE_POINTS and left < FALSE_POINTS_RATIO)
    zero = max((item.value for item in evidence if item.name == "zero gradients"), default=0.0)
    false |= zero >= BLIND_SHARE and points > BLIND_POINTS
    ok = points <= GAP_POINTS or not (false or left < DOUBT_RATIO)
    return Evidence(
        name="gap",
        value=shown,
        expected=f"at most {GAP_POINTS:g}, or {DOUBT_RATIO:g} of PGD-10 left",
        ok=ok,
        weight="decides" if false and norm != "L1" else "doubt",
        text=f"points from PGD-10 ({100 * claimed:.1f}) to the worst case ({100 * worst:.1f}); {share:.2f} left",
    )


def decide(
    claimed: float, worst: float, evidence: Sequence[Evidence], *, chance: float, images: int
) -> tuple[Word, list[str]]:
    """The verdict and its reasons; the first of the ``evidence`` is that of :func:`weigh_gap`."""
    gap, *rest = evidence
    doubts = [item for item in rest if not item.ok and item.weight != "note"]
    signs = [f"{item.text}: {item.value:.3g}, expected {item.expected}" for item in doubts]
    numbers = f"PGD-10 leaves {claimed:.1%}, the worst case {worst:.1%} of {images} images"
    constant = f"always answering the most frequent class gets {chance:.1%}"
    lost = worst <= max(NONE_LEFT, chance)
    if lost and claimed <= NONE_CLAIMED:
        return "none", [numbers]
    if lost and claimed <= chance and (gap.ok or (gap.value <= FALSE_POINTS and not doubts)):
        return "none", [numbers, constant]
    if images < LEAST_IMAGES:
        return "inconclusive", [numbers, f"fewer than {LEAST_IMAGES} images decide nothing", *signs]
    if any(item.name == "random" for item in doubts):
        draws = "a worst case over attacks is one over draws too, so that random outputs always show a gap"
        return "inconclusive", [numbers, *signs, draws]
    if not gap.ok and (gap.weight == "decides" or doubts):
        return "false", [f"{numbers}: no such gap on a soundly trained model", *signs]
    if not gap.ok:
        return "inconclusive", [f"{numbers}: a wide gap, but nothing else shows that gradients are masked"]
    if doubts:
        return "inconclusive", [numbers, *signs]
    if lost:
        return "none", [numbers, constant]
    return "real", [numbers, "accuracy levels off with more steps and falls with eps, and the gradients are sound"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """What an audit found. ``verdict``: real, false, inconclusive, or none: no robustness, and none hidden either."""

    verdict: Word
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    threat: ThreatModel
    route: str
    images: int
    ladder: tuple[Step, ...]
    evidence: tuple[Evidence, ...]
    #: Accuracy under PGD-20 by eps.
    eps_curve: tuple[tuple[float, float], ...]
    #: Largest share of one class: what a constant answer gets.
    chance: float
    #: Of the branches that were not judged, and of each Gaussian of a mixture norm alone (``fixed adv``): clean, PGD-10
    #: and worst-case accuracy.
    others: Mapping[str, Mapping[str, float]]
    conditions: Mapping[str, Any]

    @property
    def clean(self) -> float:
        """Clean accuracy."""
        return self.ladder[0].worst

    @property
    def claimed(self) -> float:
        """Accuracy under PGD-10, by which most papers claim robustness."""
        return next(step.alone for step in self.ladder if step.attack == "pgd10" and step.alone is not None)

    @property
    def worst_case(self) -> float:
        """Share of the images that withstood everything."""
        return self.ladder[-1].worst

    @property
    def exit_code(self) -> int:
        """For scripts: 0 real, 1 false, 3 inconclusive, 4 none; 2 is a usage error."""
        return VERDICTS[self.verdict]

    def table(self) -> Table:
        """The ladder, for the terminal."""
        from rich.table import Table

        title = f"{self.route}, {self.images} images, {self.threat}"
        caption = "".join(told_about(self.conditions)) or None
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        table.add_column("attack", no_wrap=True)
        table.add_column("")
        for column in ("accuracy", "worst case so far"):
            table.add_column(column, justify="right")
        for step in self.ladder:
            alone = step.skipped or ("" if step.alone is None else f"{100 * step.alone:.1f}")
            table.add_row(step.attack, step.text, alone, f"{100 * step.worst:.1f}")
        for route, row in self.others.items():
            cells = " / ".join(f"{name} {100 * value:.1f}" for name, value in row.items())
            label = route if route.startswith(FIXED) else f"branch {route}"
            table.add_row(label, cells, "", f"{100 * row['worst case']:.1f}")
        return table

    def evidence_table(self) -> Table:
        """The measurements, for the terminal."""
        from rich.table import Table

        table = Table("", "evidence", title="evidence", title_justify="left")
        table.add_column("measured", justify="right")
        table.add_column("expected")
        marks = {"decides": "[bold red]✗[/]", "doubt": "[yellow]?[/]", "note": "[dim]i[/]"}
        for item in self.evidence:
            mark = "[green]✓[/]" if item.ok else marks[item.weight]
            table.add_row(mark, item.text, f"{item.value:.3g}", item.expected)
        return table

    def summary(self) -> str:
        """The verdict in words, with reasons and advice."""
        headline = {
            "real": "REAL: nothing found that speaks against this robustness",
            "false": "FALSE: this robustness does not stand up to stronger attacks",
            "inconclusive": "INCONCLUSIVE: what was found does not decide whether this robustness is real"
            if self.images >= LEAST_IMAGES
            else f"INCONCLUSIVE: {self.images} images are too few to decide",
            "none": "NONE: this model is not robust at this eps"
            + (", and PGD-10 says so too" if self.claimed <= max(NONE_CLAIMED, self.chance) else ""),
        }[self.verdict]
        lines = [headline, *(f"  - {reason}" for reason in self.reasons)]
        if self.advice:
            lines += ["What to try:", *(f"  - {advice}" for advice in self.advice)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join([rendered(self.table()), rendered(self.evidence_table()), self.summary()])

    def record(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {
            "format": "advnorm.audit/1",
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "reasons": list(self.reasons),
            "advice": list(self.advice),
            "clean": self.clean,
            "pgd10": self.claimed,
            "worst_case": self.worst_case,
            "threat": dataclasses.asdict(self.threat),
            "route": self.route,
            "images": self.images,
            "chance": self.chance,
            "ladder": [dataclasses.asdict(step) for step in self.ladder],
            "evidence": [
                {**dataclasses.asdict(e), "value": e.value if math.isfinite(e.value) else None} for e in self.evidence
            ],
            "eps_curve": [list(point) for point in self.eps_curve],
            "other_branches": {route: dict(row) for route, row in self.others.items()},
            **self.conditions,
        }

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> Verdict:
        """The verdict that :meth:`record` came from."""
        if record.get("format") != "advnorm.audit/1":
            raise ConfigError(f"not the record of an audit: its format is {record.get('format')!r}")
        told = {"format", "exit_code", "clean", "pgd10", "worst_case", "other_branches"}  # follow from the others
        fields = {field.name for field in dataclasses.fields(cls)}
        found = {
            **{key: value for key, value in record.items() if key in fields},
            "reasons": tuple(record["reasons"]),
            "advice": tuple(record["advice"]),
            "threat": ThreatModel(**record["threat"]),
            "ladder": tuple(Step(**step) for step in record["ladder"]),
            "evidence": tuple(
                Evidence(**{**item, "value": math.nan if item["value"] is None else item["value"]})
                for item in record["evidence"]
            ),
            "eps_curve": tuple((eps, accuracy) for eps, accuracy in record["eps_curve"]),
            "others": record["other_branches"],
            "conditions": {key: value for key, value in record.items() if key not in fields | told},
        }
        return cls(**found)

    @classmethod
    def load(cls, path: Path | str) -> Verdict:
        """Read a record from disk."""
        return cls.of_record(read_json(Path(path)))

    def plot(self, path: Path | str) -> None:
        """Write a figure: accuracy along the ladder, and against eps."""
        from matplotlib.figure import Figure

        raise_all(plot_problems(path), "bad plot")
        blue, orange, grey = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito: safe for the colour-blind
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        bars, curve = figure.subplots(1, 2, width_ratios=(2.2, 1))
        names = [step.attack for step in self.ladder]
        worst = [100 * step.worst for step in self.ladder]
        bars.bar(names, worst, color=blue, label="worst case so far")
        alone = [(step.attack, 100 * step.alone) for step in self.ladder if step.alone is not None]
        bars.plot(*zip(*alone), "o", color=orange, markeredgecolor="white", markersize=8, label="this attack alone")
        text: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
        for place, step in enumerate(self.ladder):
            if step.alone is not None:
                bars.annotate(f"{100 * step.alone:.0f}", (place, 100 * step.alone), (0, 6), **text)
            if worst[place] >= 8:  # the bar's own number at its foot, out of the points' way
                bars.annotate(f"{worst[place]:.0f}", (place, 0), (0, 3), color="white", **text)
            elif step.alone is None:
                bars.annotate(f"{worst[place]:.0f}", (place, worst[place]), (0, 3), **text)
        curve.plot([eps for eps, _ in self.eps_curve], [100 * a for _, a in self.eps_curve], "o-", color=blue)
        curve.axvline(self.threat.eps, color=orange, linestyle=":", label=f"{self.threat}")
        for axes in (bars, curve):
            axes.axhline(100 * self.chance, color=grey, linestyle="--", linewidth=1, label="one class for all")
            axes.set_ylim(0, 108)
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8, loc="upper right")
        bars.set_ylabel("accuracy (%)")
        bars.tick_params(axis="x", labelrotation=40)
        for label in bars.get_xticklabels():
            label.set_horizontalalignment("right")
        curve.set_xlabel(f"eps ({self.threat.norm}), PGD-20 on two losses")
        figure.suptitle(
            f"{self.verdict}: clean {self.clean:.0%}, PGD-10 {self.claimed:.0%}, worst {self.worst_case:.0%}"
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def plot_problems(path: Path | str) -> list[str | Problem]:
    """What keeps a figure from being written; to be asked before the work that it shows."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    suffix = Path(path).suffix.removeprefix(".")
    if suffix not in known:
        return [f"{path} names no known kind of figure{did_you_mean(suffix, known)}", *writable_problems(path)]
    return [*writable_problems(path)]
