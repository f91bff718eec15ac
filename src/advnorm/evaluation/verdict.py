"""The verdict of an audit as tables, text, record and figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NotRequired, TypedDict

from advnorm._core.errors import ConfigError, Problem, raise_problems, unknown_name
from advnorm._core.exit_codes import VERDICTS
from advnorm._core.records import read_json, writable_problems, write_figure
from advnorm._core.settings import Setting
from advnorm._core.shapes import Fraction, check_record
from advnorm.evaluation.audit_thresholds import LEAST_IMAGES, NONE_CLAIMED
from advnorm.evaluation.evidence import Evidence, RungResult, VerdictName, Weight
from advnorm.evaluation.results import CURE, describe_origin, label_of, read_from, render_table
from advnorm.threat import ThreatModel

if TYPE_CHECKING:
    from rich.table import Table

#: Prefix of a Gaussian of a mixture norm that is evaluated alone: ``fixed adv``.
FIXED = "fixed "
#: Keys of a record that follow from others.
_DERIVED = {"format", "exit_code", "clean", "pgd10", "worst_case", "other_branches"}


class EvidenceRecord(TypedDict):
    """An :class:`Evidence` in a record, where None stands for NaN and infinity."""

    name: str
    value: float | None
    expected: str
    ok: bool
    weight: Weight
    text: str
    measured: NotRequired[str]


class AuditRecord(TypedDict):
    """The entries of an audit's record that readers use."""

    verdict: VerdictName
    reasons: list[str]
    advice: list[str]
    threat: ThreatModel
    route: str
    images: Annotated[int, Setting("Number of images.", "[1, inf)")]
    ladder: list[RungResult]
    evidence: list[EvidenceRecord]
    eps_curve: list[tuple[float, Fraction]]
    chance: Fraction
    other_branches: dict[str, dict[str, Fraction]]
    rows: NotRequired[list[Any]]  # of the images in their data set
    about: NotRequired[dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Verdict:
    """The findings of an audit. ``verdict``: real, false, inconclusive, or none (no robustness, and none hidden)."""

    FORMAT: ClassVar[str] = "advnorm.audit/1"
    FORMATS: ClassVar[tuple[str, ...]] = (FORMAT,)
    SHAPE: ClassVar[type] = AuditRecord

    verdict: VerdictName
    reasons: tuple[str, ...]
    advice: tuple[str, ...]
    threat: ThreatModel
    route: str
    images: int
    ladder: tuple[RungResult, ...]
    evidence: tuple[Evidence, ...]
    #: Accuracy by eps, from the smallest perturbations found; in older records under PGD-20.
    eps_curve: tuple[tuple[float, float], ...]
    #: Accuracy of a constant answer: the largest share of one class.
    chance: float
    #: Clean, PGD-10 and worst-case accuracy of the other branches, and of each Gaussian of a mixture norm alone.
    others: Mapping[str, Mapping[str, float]]
    conditions: Mapping[str, Any]

    @property
    def clean(self) -> float:
        return self.ladder[0].worst

    @property
    def claimed(self) -> float:
        """PGD-10 accuracy, by which most papers claim robustness."""
        return next(rung.alone for rung in self.ladder if rung.attack == "pgd10" and rung.alone is not None)

    @property
    def worst_case(self) -> float:
        """Share of the images that are robust to every attack."""
        return self.ladder[-1].worst

    @property
    def exit_code(self) -> int:
        """Exit status of the command: 0 real, 1 false, 3 inconclusive, 4 none; 2 is a usage error."""
        return VERDICTS[self.verdict]

    def table(self) -> Table:
        """Return the ladder for the terminal."""
        from rich.table import Table

        title = f"{label_of(self.route)}, {self.images} images, {self.threat}"
        caption = "".join(describe_origin(self.conditions)) or None
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        table.add_column("attack", no_wrap=True)
        table.add_column("")
        for column in ("accuracy", "worst case so far"):
            table.add_column(column, justify="right")
        for rung in self.ladder:
            alone = rung.skipped or ("" if rung.alone is None else f"{100 * rung.alone:.1f}")
            table.add_row(rung.attack, rung.text, alone, f"{100 * rung.worst:.1f}")
        for route, row in self.others.items():
            cells = " / ".join(f"{name} {100 * value:.1f}" for name, value in row.items())
            label = route if route.startswith(FIXED) else f"branch {route}"
            table.add_row(label, cells, "", f"{100 * row['worst case']:.1f}")
        return table

    def evidence_table(self) -> Table:
        """Return the measurements for the terminal."""
        from rich.table import Table
        from rich.text import Text

        table = Table("", "evidence", title="evidence", title_justify="left")
        table.add_column("measured", justify="right")
        table.add_column("expected")
        marks = {"decides": "[bold red]✗[/]", "doubt": "[yellow]?[/]", "note": "[dim]i[/]"}
        for item in self.evidence:
            mark = "[green]✓[/]" if item.ok else marks[item.weight]
            table.add_row(Text.from_markup(mark), item.text, item.measured, item.expected)
        return table

    def summary(self) -> str:
        """Return the verdict in words, with reasons and advice."""
        headline = {
            "real": "REAL: no evidence against this robustness",
            "false": "FALSE: stronger attacks remove this robustness",
            "inconclusive": "INCONCLUSIVE: the evidence does not decide whether this robustness is real"
            if self.images >= LEAST_IMAGES
            else f"INCONCLUSIVE: {self.images} images are too few to decide",
            "none": "NONE: this model is not robust at this eps"
            + (", and PGD-10 agrees" if self.claimed <= max(NONE_CLAIMED, self.chance) else ""),
        }[self.verdict]
        lines = [headline, *(f"  - {reason}" for reason in self.reasons)]
        if self.advice:
            lines += ["What to try:", *(f"  - {advice}" for advice in self.advice)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return "\n".join([render_table(self.table()), render_table(self.evidence_table()), self.summary()])

    def record(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        plain = dataclasses.asdict(self)
        others, conditions = plain.pop("others"), plain.pop("conditions")
        for item in plain["evidence"]:
            item["value"] = item["value"] if math.isfinite(item["value"]) else None
        return {
            "format": self.FORMAT,
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "clean": self.clean,
            "pgd10": self.claimed,
            "worst_case": self.worst_case,
            **plain,
            "other_branches": others,
            **{key: value for key, value in conditions.items() if key != "digest"},
        }

    @classmethod
    def from_record(cls, record: Mapping[str, Any], source: object = "the record") -> Verdict:
        """Rebuild the verdict of :meth:`record`; ``source`` names the record in errors."""
        check_record(record, cls.SHAPE, source, CURE, cls.FORMAT)
        if not any(rung["attack"] == "pgd10" and rung["alone"] is not None for rung in record["ladder"]):
            message = "{field} must have an accuracy under pgd10"
            raise ConfigError("damaged_file", message, field=f"{source}: ladder", hint=CURE)
        fields = {field.name for field in dataclasses.fields(cls)}
        values = {key: value for key, value in record.items() if key in fields}
        numbers = [math.nan if item["value"] is None else item["value"] for item in record["evidence"]]
        values |= {
            "reasons": tuple(record["reasons"]),
            "advice": tuple(record["advice"]),
            "threat": ThreatModel(**record["threat"]),
            "ladder": tuple(RungResult(**_known(rung, RungResult)) for rung in record["ladder"]),
            "evidence": tuple(
                Evidence(**{**_known(item, Evidence), "value": number})
                for item, number in zip(record["evidence"], numbers)
            ),
            "eps_curve": tuple(tuple(point) for point in record["eps_curve"]),
            "others": record["other_branches"],
            "conditions": {k: v for k, v in record.items() if k not in fields | _DERIVED} | read_from(record),
        }
        return cls(**values)

    @classmethod
    def load(cls, path: Path | str) -> Verdict:
        """Read a record from disk."""
        return cls.from_record(read_json(Path(path)), path)

    def plot(self, path: Path | str) -> None:
        """Write a figure of the accuracy along the ladder and against eps."""
        from matplotlib.figure import Figure

        raise_problems(plot_problems(path), "bad plot")
        blue, orange, grey = "#0072B2", "#D55E00", "#666666"  # Okabe and Ito: safe for the colour-blind
        rungs = self.ladder[::-1]  # the first one at the top
        figure = Figure(figsize=(11, 1.6 + 0.27 * max(len(rungs), 10)), layout="constrained")
        bars, curve = figure.subplots(1, 2, width_ratios=(1.6, 1))
        worst = [100 * rung.worst for rung in rungs]
        bars.barh(range(len(rungs)), worst, color=blue, label="worst case so far")
        alone = [(100 * rung.alone, place) for place, rung in enumerate(rungs) if rung.alone is not None]
        bars.plot(*zip(*alone), "o", color=orange, markeredgecolor="white", markersize=7, label="this attack alone")
        text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        for value, place in alone:
            bars.annotate(f"{value:.0f}", (value, place), (6, 0), **text)
        for place, value in enumerate(worst):  # at the foot of a long bar, away from the points
            style = {"color": "white"} if value >= 8 else {}
            if style or rungs[place].alone is None:
                bars.annotate(f"{value:.0f}", (0 if style else value, place), (3, 0), **text, **style)
        bars.set_yticks(range(len(rungs)), [rung.attack for rung in rungs], fontsize=8)
        curve.plot([eps for eps, _ in self.eps_curve], [100 * a for _, a in self.eps_curve], "o-", color=blue)
        curve.axvline(self.threat.eps, color=orange, linestyle=":", label=f"{self.threat}")
        level: dict[str, Any] = {"color": grey, "linestyle": "--", "linewidth": 1, "label": "one class for all"}
        bars.axvline(100 * self.chance, **level)
        curve.axhline(100 * self.chance, **level)
        bars.set_xlim(0, 108)
        curve.set_ylim(0, 108)
        for axes in (bars, curve):
            axes.spines[["top", "right"]].set_visible(False)
            axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)
        bars.set_xlabel("accuracy (%)")
        curve.set_ylabel("accuracy (%)")
        curve.set_xlabel(f"eps ({self.threat.norm})")
        figure.suptitle(
            f"{self.verdict}: clean {self.clean:.0%}, PGD-10 {self.claimed:.0%}, worst {self.worst_case:.0%}"
        )
        write_figure(path, figure)


def _known(entries: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """The entries that are fields of a dataclass; records of other versions may have more."""
    return {field.name: entries[field.name] for field in dataclasses.fields(kind) if field.name in entries}


def plot_problems(path: Path | str) -> list[Problem]:
    """Return the reasons why a figure cannot be written, before the computation that it shows."""
    suffix, known = Path(path).suffix.removeprefix("."), ("png", "svg", "pdf")
    unknown = [] if suffix in known else [unknown_name(f"figure format of {path}:", suffix, known, "plot")]
    return [*unknown, *writable_problems(path)]
