"""The page of training runs, evaluations and audits, from plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advnorm.report.figures import FigureRow, LineChart
from advnorm.report.page import ReportPage
from advnorm.report.tables import CellValue, ReportTable, make_columns

if TYPE_CHECKING:
    from advnorm.evaluation.report_data import EvaluationFile, FolderResults, RunSummary

#: Number of runs in the figure.
MOST_LINES = 6


def build_runs_page(found: FolderResults) -> ReportPage:
    """Build a page with every run and its training accuracy, and every evaluation and audit with its conditions."""
    tables = [_run_table(found["runs"])] if found["runs"] else []
    tables += [_evaluation_table(found["benchmarks"])] if found["benchmarks"] else []
    tables += [_audit_table(found["audits"])] if found["audits"] else []
    if found["problems"]:
        rows = [[problem] for problem in found["problems"]]
        tables.append({"title": "Not read", "columns": make_columns({"text": ["file and reason"]}), "rows": rows})
    everything = found["runs"] + found["benchmarks"] + found["audits"]
    records = [one["record"] for one in everything if one["record"]]
    return {
        "title": f"Training runs in {found['folder']}",
        "about": "Training runs and their evaluations. Accuracy in training is measured on the training images while "
        "the network learns; the tables below it have the accuracy on test images.",
        "tables": tables,
        "figures": _training_curves(found["runs"]),
        "conditions": {
            what: ", ".join(dict.fromkeys(str(record[key]) for record in records if record.get(key) is not None))
            or None
            for what, key in (("devices", "device"), ("torch", "torch"), ("commits", "commit"))
        },
        "commands": ["advnorm evaluate RUN --attacks pgd10 autoattack --json RUN/evaluation.json", "advnorm audit RUN"],
    }


def _run_table(runs: Sequence[RunSummary]) -> ReportTable:
    rows: list[list[CellValue]] = []
    for run in runs:
        config, record, last = run["config"], run["record"], (run["metrics"] or [{}])[-1]
        epochs = f"{last.get('epoch', 0)} of {config['epochs'] * config['budget']}"
        minutes = "not finished" if record is None else f"{record['seconds'] / 60:.1f}"
        held_out = [_held_out_text(row) for row in ((record or {}).get("best"), last)]
        settings = [config["norm"], _method_name(config), str(config["eps"]), epochs, str(config["seed"]), minutes]
        rows += [[run["name"]], [*settings, *held_out, last.get("clean_accuracy"), last.get("adv_accuracy")]]
    return {
        "title": "Runs",
        "columns": make_columns(
            {
                "text": ["norm", "objective", "eps", "epochs", "seed", "minutes", "held out, best", "held out, last"],
                "percent": ["clean, training", "adv, training"],
            }
        ),
        "rows": rows,
        "note": "Percent. The best checkpoint is chosen on images held out of the training, never on test images.",
    }


def _method_name(config: Mapping[str, Any]) -> str:
    """The objective with its regularizer, second pass and image mixing."""
    extras = [config[key]["name"] for key in ("regularizer", "second_pass") if config.get(key)]
    extras += [config["mix"]] if config.get("mix", "none") != "none" else []
    return " + ".join([config["objective"]["name"], *extras])


def _held_out_text(row: Mapping[str, Any] | None) -> str:
    found = {name: value for name, value in ((row or {}).get("held_out") or {}).items() if name != "score"}
    words = {"training": "training attack"}
    return ", ".join(f"{words.get(name, name)} {100 * value:.1f}" for name, value in found.items()) or "–"


def _evaluation_table(evaluations: Sequence[EvaluationFile]) -> ReportTable:
    names = (name for one in evaluations for row in one["record"]["accuracy"].values() for name in row)
    attacks = [name for name in dict.fromkeys(names) if name not in ("clean", "union")]
    rows: list[list[CellValue]] = []
    for one in evaluations:
        rows.append([_heading(one)])
        for branch, accuracy in one["record"]["accuracy"].items():
            label = "default route" if branch == "default" else branch
            rows.append([label, *(accuracy.get(name) for name in ("clean", *attacks, "union"))])
    return {
        "title": "Evaluated",
        "columns": make_columns({"text": ["branch"], "percent": ["clean", *attacks, "all attacks"]}),
        "rows": rows,
        "note": "Percent of the images; all attacks: images that withstand every attack.",
    }


def _audit_table(audits: Sequence[EvaluationFile]) -> ReportTable:
    rows: list[list[CellValue]] = []
    for one in audits:
        columns = ("route", "verdict", "clean", "pgd10", "worst_case")
        rows += [[_heading(one)], [one["record"][column] for column in columns]]
    return {
        "title": "Is it real?",
        "columns": make_columns({"text": ["branch", "verdict"], "percent": ["clean", "PGD-10", "worst case"]}),
        "rows": rows,
        "note": "Verdicts of advnorm audit; each record has the evidence.",
    }


def _heading(evaluation: EvaluationFile) -> str:
    """Network, checkpoint, data and threat, if the record names them; an unnamed network gets its file's name."""
    record = evaluation["record"]
    about: Mapping[str, Any] = record.get("about") or {}
    checkpoint = about.get("checkpoint") and f"{about['checkpoint']} checkpoint"
    parts = (checkpoint, about.get("data"), evaluation["threat"], f"{record['images']:,} images")
    network = about.get("run") or about.get("model") or evaluation["file"]
    return f"{network}: {', '.join(str(part) for part in parts if part)}"


def _training_curves(runs: Sequence[RunSummary]) -> list[LineChart]:
    """Accuracy on adversarial training images of the first runs that have it for more than one epoch."""
    trained = [run for run in runs if sum("adv_accuracy" in row for row in run["metrics"]) > 1]
    chosen = trained[:MOST_LINES]
    if not chosen:
        return []
    epochs = sorted({row["epoch"] for run in chosen for row in run["metrics"]})
    rows: list[FigureRow] = []
    for run, label in zip(chosen, _short_labels(chosen)):
        by_epoch = {row["epoch"]: row.get("adv_accuracy") for row in run["metrics"]}
        rows.append({"label": label, "values": [by_epoch.get(epoch) for epoch in epochs]})
    title = "Accuracy on adversarial images of the training"
    note = f"The first {MOST_LINES} of {len(trained)} runs." if len(trained) > MOST_LINES else ""
    return [{"kind": "lines", "title": title, "x": epochs, "x_label": "epoch", "rows": rows, "note": note}]


def _short_labels(runs: Sequence[RunSummary]) -> list[str]:
    """The fewest settings that distinguish the runs, else numbers."""
    settings = [
        (config["norm"], _method_name(config), f"eps {config['eps']}", f"seed {config['seed']}")
        for config in (run["config"] for run in runs)
    ]
    for length in range(1, 5):
        labels = [", ".join(parts[:length]) for parts in settings]
        if len(set(labels)) == len(labels):
            return labels
    return [f"run {place}, {parts[0]}" for place, parts in enumerate(settings, 1)]
