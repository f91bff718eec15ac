"""The page of training runs, evaluations and audits, from their rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isclose
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from advnorm.report.audits import audit_figures, evidence_tables
from advnorm.report.figures import LineChart, PointPlot, PointRow
from advnorm.report.page import ReportPage
from advnorm.report.rows import Row, result_rows
from advnorm.report.tables import CellValue, ReportTable, make_columns

if TYPE_CHECKING:
    from advnorm.evaluation.report_data import FolderResults

#: Lines of a figure: as many as there are colours.
LINES_PER_FIGURE = 4
#: Settings that name a configuration if they differ, and conditions that its evaluations share.
SETTINGS = ("norm", "objective", "eps", "threat", "model", "data", "epochs")
CONDITIONS = ("checkpoint", "eval_data", "eval_threat", "eval_eps", "images")


def build_runs_page(found: FolderResults) -> ReportPage:
    """Build a page with the accuracies over seeds, training curves, and every run, evaluation and audit."""
    rows = result_rows(found)
    damaged = [[f"{row.get('record') or row['run']}: {row['error']}"] for row in rows if row.get("error")]
    rows = [row for row in rows if not row.get("error")]
    evaluated = [row for row in rows if row.get("attack") not in (None, "audit")]
    runs = list({row["run"]: row for row in rows if "finished" in row}.values())
    audited = [row for row in rows if row.get("verdict")]
    tables = [seed_table(evaluated)] if evaluated else []
    tables += [_audit_table(audited)] if audited else []
    tables += _alarm_table(found)
    if damaged:
        tables.append({"title": "Not read", "columns": make_columns({"text": ["file and reason"]}), "rows": damaged})
    single = [{**row, "group": row["record"]} for row in evaluated]
    files, names = found["benchmarks"] + found["audits"], _audit_names(audited)
    audits = [audit for audit in found["audits"] if audit["file"] in names]
    records = [*rows, *(one["record"] for one in files)]
    undigested = [one["file"] for one in files if one["record"].get("digest") == "none"]  # an edit would go unnoticed
    return {
        "title": f"Training runs in {found['folder']}",
        "about": "Accuracy in training is measured on the training images while the network learns; the accuracy of an "
        "evaluation on test images.",
        "tables": tables,
        "figures": [
            *([_accuracy_plot(evaluated)] if evaluated else []),
            *audit_figures(audits, names),
            *_training_curves(found, runs),
        ],
        "details": [
            *([_run_table(runs)] if runs else []),
            *([seed_table(single, "All evaluations")] if single else []),
            *evidence_tables(audits, names),
        ],
        "conditions": {
            what: ", ".join(dict.fromkeys(str(record[key]) for record in records if record.get(key))) or None
            for what, key in (("devices", "device"), ("torch", "torch"), ("commits", "commit"))
        }
        | ({"records without digest": ", ".join(undigested)} if undigested else {}),
    }


# -- runs of one configuration -----------------------------------------------------------------------------------------

#: An accuracy and the bounds of its interval.
Measured = tuple[float, float, float]
#: Accuracies by label of the configuration, branch, attack and seed.
Accuracies = dict[str, dict[str, dict[str, dict[Any, Measured]]]]


def seed_table(rows: Sequence[Row], title: str = "Accuracy") -> ReportTable:
    """Mean and standard deviation over the seeds of each group of rows, by branch."""
    attacks, lines = _attacks(rows), list[list[CellValue]]()
    for label, branches in _by_group(rows).items():
        lines.append([label])
        for branch, found in branches.items():
            seeds = max(map(len, found.values()))
            cells = [_mean_text(list(found.get(attack, {}).values()), seeds) for attack in attacks]
            lines.append([_branch_label(branch), str(seeds), *cells])
    common = [name for name in (*SETTINGS, *CONDITIONS) if rows[0].get(name) is not None and not _differs(name, rows)]
    common_text = ", ".join(_setting_text(name, rows[0][name]) for name in common)
    labels = ["all attacks" if attack == "union" else attack for attack in attacks]
    return {
        "title": title,
        "columns": make_columns({"text": ["branch", "seeds"], "percent": labels}),
        "rows": lines,
        "stacked": any("(" in str(cell) for line in lines for cell in line[2:]),  # intervals are long
        "note": "Percent of the test images: mean ± standard deviation over seeds; for one seed with Wilson's "
        "95\u00a0% interval. All attacks: images that are robust to every attack. "
        f"Common to all rows: {common_text or 'nothing'}.",
    }


def _by_group(rows: Sequence[Row]) -> Accuracies:
    """Several runs of one seed count once."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        name = row.get("group") or row.get("run")
        groups.setdefault((name, *(row.get(key) for key in CONDITIONS)), []).append(row)
    found: Accuracies = {}
    for label, members in zip(_labels([rows[0] for rows in groups.values()], CONDITIONS), groups.values()):
        values: dict[tuple[str, str, Any], list[Measured]] = {}
        for row in members:
            measured = row["accuracy"], row["low"], row["high"]
            values.setdefault((row["branch"], row["attack"], row.get("seed")), []).append(measured)
        for (branch, attack, seed), same in values.items():
            accuracy, low, high = map(fmean, zip(*same))
            found.setdefault(label, {}).setdefault(branch, {}).setdefault(attack, {})[seed] = accuracy, low, high
    return found


def _labels(rows: Sequence[Row], conditions: Sequence[str] = ()) -> list[str]:
    """Name each row by the settings and conditions in which it differs from others; as few as are needed."""
    others = [name for name in rows[0] if name.startswith("config.") and name.split(".")[1] not in (*SETTINGS, "name")]
    chosen = [name for name in SETTINGS if _differs(name, rows)] or ["norm"]
    chosen += [name for name in conditions if _differs(name, rows)]

    def labels() -> list[str]:
        texts = [[_setting_text(name, row[name]) for name in chosen if row.get(name) is not None] for row in rows]
        return [", ".join([*([] if "norm" in row else [str(row["run"])]), *text]) for row, text in zip(rows, texts)]

    for name in (*others, "run", "record"):
        if len(set(labels())) < len(rows) and _differs(name, rows):
            chosen.append(name)
    return labels()


def _differs(name: str, rows: Iterable[Row]) -> bool:
    return len({str(row.get(name)) for row in rows}) > 1


def _setting_text(name: str, value: object) -> str:
    words = {
        "eps": "eps {}",
        "threat": "trained in {}",
        "epochs": "{} epoch" if value == 1 else "{} epochs",
        "checkpoint": "{} checkpoint",
        "eval_data": "tested on {}",
        "eval_threat": "attacked in {}",
        "eval_eps": "attacked with eps {}",
        "images": "{} images",
    }
    default = f"{name.removeprefix('config.')}={{}}" if name.startswith("config.") else "{}"
    return words.get(name, default).format(_eps_text(value) if isinstance(value, float) and "eps" in name else value)


def _eps_text(eps: float) -> str:
    """``8/255`` or ``0.1``, as one writes it."""
    pixels = round(4 * 255 * eps) / 4
    return f"{pixels:g}/255" if len(f"{eps:g}") > 5 and isclose(pixels / 255, eps) else f"{eps:g}"


def _attacks(rows: Iterable[Row]) -> list[str]:
    names = dict.fromkeys(row["attack"] for row in rows)
    return ["clean", *(name for name in names if name not in ("clean", "union")), "union"]


def _branch_label(branch: str) -> str:
    return "default route" if branch == "default" else branch


def _mean_text(measured: Sequence[Measured], seeds: int) -> str | None:
    """``93.1 ± 0.4``, or ``93.1 (90.6–95.0)`` for one seed; with the number of seeds if some are missing."""
    if not measured:
        return None
    values = [accuracy for accuracy, _, _ in measured]
    low, high = measured[0][1:]
    spread = (
        f"±\u00a0{100 * stdev(values):.1f}" if len(values) > 1 else f"({100 * low:.1f}\u2060–\u2060{100 * high:.1f})"
    )
    return f"{100 * fmean(values):.1f} {spread}{f' (n={len(values)})' if len(values) < seeds else ''}"


# -- figures -----------------------------------------------------------------------------------------------------------


def _accuracy_plot(rows: Sequence[Row]) -> PointPlot:
    """A line per configuration and branch, and a point per attack: with 30 runs it is still one screen."""
    attacks = [attack for attack in _attacks(rows) if attack != "union"][:LINES_PER_FIGURE]
    groups = []
    for label, branches in _by_group(rows).items():
        points = []
        for branch, found in branches.items():
            values = [[accuracy for accuracy, _, _ in found.get(attack, {}).values()] for attack in attacks]
            means = [fmean(seeds) if seeds else None for seeds in values]
            spreads = [stdev(seeds) if len(seeds) > 1 else None for seeds in values]
            points.append(PointRow(label=_branch_label(branch), values=means, spreads=spreads))
        groups.append((label, points))
    title, note = "Accuracy, with and without attacks", "Points: mean over seeds. Lines: ± standard deviation."
    return {"kind": "points", "title": title, "series": attacks, "groups": groups, "note": note}


def _training_curves(found: FolderResults, runs: Sequence[Row]) -> list[LineChart]:
    """Accuracy on adversarial training images, mean over seeds; a few configurations per figure."""
    metrics = {run["name"]: run["metrics"] for run in found["runs"]}
    groups: dict[str, list[Row]] = {}
    for run in runs:
        if sum("adv_accuracy" in epoch for epoch in metrics[run["run"]]) > 1:
            groups.setdefault(run["group"], []).append(run)
    labels = _labels([members[0] for members in groups.values()]) if groups else []
    charts: list[LineChart] = []
    for start in range(0, len(labels), LINES_PER_FIGURE):
        curves = [
            [
                {row["epoch"]: row["adv_accuracy"] for row in metrics[run["run"]] if "adv_accuracy" in row}
                for run in members
            ]
            for members in list(groups.values())[start : start + LINES_PER_FIGURE]
        ]
        epochs = sorted({epoch for members in curves for curve in members for epoch in curve})
        means = [[[curve[epoch] for curve in members if epoch in curve] for epoch in epochs] for members in curves]
        part = f", {start // LINES_PER_FIGURE + 1}" if len(labels) > LINES_PER_FIGURE else ""
        charts.append(
            {
                "kind": "lines",
                "title": f"Accuracy on adversarial images of the training{part}",
                "x": epochs,
                "x_label": "epoch",
                "rows": [
                    {"label": label, "values": [fmean(values) if values else None for values in line]}
                    for label, line in zip(labels[start:], means)
                ],
                "note": "Mean over seeds.",
            }
        )
    return charts


# -- single runs and audits --------------------------------------------------------------------------------------------


def _run_table(runs: Sequence[Row]) -> ReportTable:
    rows: list[list[CellValue]] = []
    for run in runs:
        settings = [run["model"], run["data"], run["norm"], run["objective"], str(run["config.eps"]), str(run["seed"])]
        epochs = f"{run.get('last.epoch', 0)} of {run['epochs']}"
        minutes = (
            "not finished" if run["minutes"] is None else f"{run['minutes']:{'.1f' if run['minutes'] >= 1 else '.2g'}}"
        )
        held_out = [_pair_text(run, f"{which}.held_out.", "") for which in ("best", "last")]
        rows += [[run["run"]], [*settings, epochs, minutes, *held_out, _pair_text(run, "last.", "_accuracy")]]
    numbers = ("epochs", "minutes", "held out, best", "held out, last", "training")
    return {
        "title": "All runs",
        "columns": make_columns({"text": ["model", "data", "norm", "objective", "eps", "seed"], "number": numbers}),
        "rows": rows,
        "note": "Percent of clean / attacked images. Held out: under the validation attack. The best checkpoint is "
        "chosen on these images, never on test images. Training: while the network learns.",
    }


def _pair_text(run: Row, before: str, after: str) -> str:
    """Accuracy on clean and on attacked images; a dash for what the run does not measure."""
    names = [name for name in run if name.startswith(before) and name.endswith(after) and name != f"{before}score"]
    clean = f"{before}clean{after}"
    pair = [run.get(clean), next((run[name] for name in names if name != clean), None)]
    return " / ".join("–" if value is None else f"{100 * value:.1f}" for value in pair)


def _alarm_table(found: FolderResults) -> list[ReportTable]:
    """Epochs in which the monitor warned, at most the first and the last of each run."""
    rows: list[list[CellValue]] = []
    for run in found["runs"]:
        alarms = [row for row in run["metrics"] if row.get("monitor", {}).get("alarm")]
        for row in dict.fromkeys((0, -1)) if alarms else ():
            epoch, monitor = alarms[row]["epoch"], alarms[row]["monitor"]
            if row == -1 and len(alarms) == 1:
                break
            strong = next(value for name, value in monitor.items() if name not in ("training", "pgd10", "alarm"))
            rows.append([f"{run['name']}, epoch {epoch}"])
            rows.append([monitor.get("training"), monitor["pgd10"], strong])
    table: ReportTable = {
        "title": "Warnings of the monitor",
        "columns": make_columns({"percent": ["training attack", "PGD-10", "strong attack"]}),
        "rows": rows,
        "note": "The strong attack leaves far less than a usual one reports. First and last such epoch of a run.",
    }
    return [table] if rows else []


def _audit_table(audits: Sequence[Row]) -> ReportTable:
    """A row per audit under the name of its network, with its conditions."""
    rows: list[list[CellValue]] = []
    for row in audits:
        conditions = [_setting_text(name, row[name]) for name in CONDITIONS if row[name] is not None]
        rows.append([", ".join([row["run"], *conditions])])
        rows.append([_branch_label(row["branch"]), row["verdict"], row["claimed"], row["accuracy"]])
    return {
        "title": "Is it real?",
        "columns": make_columns({"text": ["branch", "verdict"], "percent": ["PGD-10", "worst case"]}),
        "rows": rows,
        "note": "Verdicts of advnorm audit. Ladders, evidence and advice are below.",
    }


def _audit_names(audits: Sequence[Row]) -> dict[str, str]:
    """Name each audit's file by its network, or by the file if another audit has the same name."""
    names = {row["record"]: row["run"] + ("" if row["branch"] == "default" else f", {row['branch']}") for row in audits}
    return {file: name if [*names.values()].count(name) == 1 else file for file, name in names.items()}
