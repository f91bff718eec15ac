"""The page of training runs and of what was judged, from plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from advnorm.report.figures import Lines, Row
from advnorm.report.page import Page
from advnorm.report.tables import Cell, Column, Table

if TYPE_CHECKING:
    from advnorm.evaluation.overview import Judged, Overview, Trained

#: Runs whose accuracy is drawn: more lines are none.
LINES = 6


def readable(found: Overview) -> Overview:
    """Without what is damaged in some part that a page shows; it is told among the problems."""
    problems = list(found["problems"])

    def sound(items: Sequence[Any], shown: Callable[[Any], object], name: str) -> list[Any]:
        kept = []
        for item in items:
            try:
                shown([item])
                kept.append(item)
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"{item[name]} is skipped: {type(error).__name__}: {error}")
        return kept

    return {
        **found,
        "runs": sound(found["runs"], lambda runs: (_runs(runs), _curves(runs)), "name"),
        "benchmarks": sound(found["benchmarks"], _benchmarks, "file"),
        "audits": sound(found["audits"], _audits, "file"),
        "problems": problems,
    }


def runs_page(found: Overview) -> Page:
    """Every run with its accuracies in training, and every evaluation and audit with its conditions."""
    tables = [_runs(found["runs"])] if found["runs"] else []
    tables += [_benchmarks(found["benchmarks"])] if found["benchmarks"] else []
    tables += [_audits(found["audits"])] if found["audits"] else []
    if found["problems"]:
        files = [[file, reason] for file, _, reason in (text.partition(" is skipped: ") for text in found["problems"])]
        tables.append({"title": "Not read", "columns": _columns(("file", "why"), ()), "rows": files})
    records = [*(run["record"] for run in found["runs"]), *(j["record"] for j in found["benchmarks"] + found["audits"])]
    page: Page = {
        "title": f"Training runs in {found['folder']}",
        "about": "What was trained and what was judged. Accuracy in training is that of the images trained on, by the "
        "network of each step; what a network is worth is in the tables below it.",
        "tables": tables,
        "figures": _curves(found["runs"]),
        "conditions": {
            what: ", ".join(_distinct(record.get(key) for record in records if record)) or None
            for what, key in (("devices", "device"), ("torch", "torch"), ("commits", "commit"))
        },
        "commands": ["advnorm evaluate RUN --attacks pgd10 autoattack --json RUN/judged.json", "advnorm audit RUN"],
    }
    return page


def _distinct(items: Iterable[object]) -> list[str]:
    return list(dict.fromkeys(str(item) for item in items if item is not None))


def _columns(text: Sequence[str], percent: Sequence[str]) -> list[Column]:
    return [
        *(Column(label=label, kind="text") for label in text),
        *(Column(label=label, kind="percent") for label in percent),
    ]


def _runs(runs: Sequence[Trained]) -> Table:
    rows: list[list[Cell]] = []
    for run in runs:
        config, record, last = run["config"], run["record"], (run["metrics"] or [{}])[-1]
        epochs = f"{last.get('epoch', 0)} of {config['epochs'] * config['budget']}"
        minutes = "not finished" if record is None else f"{record['seconds'] / 60:.1f}"
        held_out = [_held_out(row) for row in ((record or {}).get("best"), last)]
        told = [config["norm"], _method(config), str(config["eps"]), epochs, str(config["seed"]), minutes]
        rows += [[run["name"]], [*told, *held_out, last.get("clean_accuracy"), last.get("adv_accuracy")]]
    return {
        "title": "Runs",
        "columns": _columns(
            ("norm", "objective", "eps", "epochs", "seed", "minutes", "held out, best", "held out, last"),
            ("clean, training", "adv, training"),
        ),
        "rows": rows,
        "note": "Percent. The best checkpoint is chosen on images held out of the training, never on test images.",
    }


def _method(config: Mapping[str, Any]) -> str:
    """The objective and what is around it: a regularizer, a second pass, mixed images."""
    extras = [config[key]["name"] for key in ("regularizer", "second_pass") if config.get(key)]
    extras += [config["mix"]] if config.get("mix", "none") != "none" else []
    return " + ".join([config["objective"]["name"], *extras])


def _held_out(row: Mapping[str, Any] | None) -> str:
    found = {name: value for name, value in ((row or {}).get("held_out") or {}).items() if name != "score"}
    words = {"training": "training attack"}
    return ", ".join(f"{words.get(name, name)} {100 * value:.1f}" for name, value in found.items()) or "–"


def _benchmarks(judged: Sequence[Judged]) -> Table:
    names = _distinct(name for one in judged for row in one["record"]["accuracy"].values() for name in row)
    attacks = [name for name in names if name not in ("clean", "union")]
    rows: list[list[Cell]] = []
    for one in judged:
        rows.append([_about(one)])
        for branch, accuracy in one["record"]["accuracy"].items():
            rows.append([branch, *(accuracy.get(name) for name in ("clean", *attacks, "union"))])
    return {
        "title": "Judged",
        "columns": _columns(("branch",), ("clean", *attacks, "all attacks")),
        "rows": rows,
        "note": "Percent of the images; all attacks: those that withstand every one of them.",
    }


def _audits(judged: Sequence[Judged]) -> Table:
    rows: list[list[Cell]] = []
    for one in judged:
        record = one["record"]
        told = [record["route"], record["verdict"], record["clean"], record["pgd10"], record["worst_case"]]
        rows += [[_about(one)], told]
    return {
        "title": "Is it real?",
        "columns": _columns(("branch", "verdict"), ("clean", "PGD-10", "worst case")),
        "rows": rows,
        "note": "Verdicts of advnorm audit; each record has the evidence.",
    }


def _about(judged: Judged) -> str:
    """Network, checkpoint, data and threat, as far as a record names them; a network without a name has its file's."""
    record = judged["record"]
    about: Mapping[str, Any] = record.get("about") or {}
    checkpoint = about.get("checkpoint") and f"{about['checkpoint']} checkpoint"
    parts = (checkpoint, about.get("data"), judged["threat"], f"{record['images']:,} images")
    network = about.get("run") or about.get("model") or judged["file"]
    return f"{network}: {', '.join(str(part) for part in parts if part)}"


def _curves(runs: Sequence[Trained]) -> list[Lines]:
    """Accuracy on adversarial images along training, of the first runs that have any and more than one epoch."""
    trained = [run for run in runs if sum("adv_accuracy" in row for row in run["metrics"]) > 1]
    chosen = trained[:LINES]
    if not chosen:
        return []
    epochs = sorted({row["epoch"] for run in chosen for row in run["metrics"]})
    rows: list[Row] = []
    for run, label in zip(chosen, _labels(chosen)):
        by_epoch = {row["epoch"]: row.get("adv_accuracy") for row in run["metrics"]}
        rows.append({"label": label, "values": [by_epoch.get(epoch) for epoch in epochs]})
    title = "Accuracy on adversarial images of the training"
    note = f"The first {LINES} of {len(trained)} runs." if len(trained) > LINES else ""
    return [{"kind": "lines", "title": title, "x": epochs, "x_label": "epoch", "rows": rows, "note": note}]


def _labels(runs: Sequence[Trained]) -> list[str]:
    """What tells runs apart, as short as it goes: some of their settings, else numbers."""
    settings = [
        (config["norm"], _method(config), f"eps {config['eps']}", f"seed {config['seed']}")
        for config in (run["config"] for run in runs)
    ]
    for length in range(1, 5):
        labels = [", ".join(parts[:length]) for parts in settings]
        if len(set(labels)) == len(labels):
            return labels
    return [f"run {place}, {parts[0]}" for place, parts in enumerate(settings, 1)]
