"""Write the tables of README.md and of pages under docs/ from records under results/ and from declarations.

python benchmarks/readme_tables.py            # rewrite them
python benchmarks/readme_tables.py --check    # exit status 1 where it would change
"""

import json
import re
import sys
from functools import cache
from pathlib import Path

from advnorm.evaluation.intervals import format_accuracy
from advnorm.report.results import outcome_sentence, results_markdown
from advnorm.studies.report_data import summarize_studies
from advnorm.studies.uncertainty import TEST_IMAGES

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
RECORDS = RESULTS / "bench"
RECIPES = RESULTS / "recipes"


def norms():
    """What routing costs: ratios to the plain network, by device and precision."""
    rows = ["| ResNet-18 | batch | precision | evaluation | training, concatenated |", "|---|---|---|---|---|"]
    for path in sorted(RECORDS.glob("norms_*.json")):
        record = json.loads(path.read_text())
        dual = record["rows"]["dual_bn"]
        where = f"{record['device']}, {record['threads']} thread(s)" if record["device"] == "cpu" else record["device"]
        cells = [f"{dual[phase]['ratio']:.2f}× ± {dual[phase]['spread'] / 2:.2f}" for phase in ("eval", "train")]
        precision = record["precision"] + (", compiled" if record["compiled"] else "")
        rows.append(f"| {where} | {record['batch_size']} | {precision} | {' | '.join(cells)} |")
    return "\n".join(rows)


def autoattack():
    """AutoAttack in each precision and the official code, beside what ran first on the same network and images."""
    rows = [
        "| AutoAttack standard | images | seconds | speed-up | robust accuracy, % | agreement |",
        "|---|---|---|---|---|---|",
    ]
    conditions = []
    for path in sorted(RECORDS.glob("autoattack_*.json")):
        record = json.loads(path.read_text())
        for name, row in record["rows"].items():
            robust = format_accuracy(row["robust"], record["images"], 2)
            beside = [f"{row['speedup']:.2f}×", robust, f"{row['agreement']:.2%}"]
            rows.append(f"| {name} | {record['images']:,} | {row['seconds']:.1f} | {' | '.join(beside)} |")
        conditions.append(
            f"The first N CIFAR-10 test images, {record['model']}, {record['threat']}, {record['device']}, seed "
            f"{record['seed']}."
        )
    return "\n".join([*rows, "", *dict.fromkeys(conditions)])


def quick():
    """The quick estimate beside AutoAttack, a row per network."""
    lines = [
        "| network | threat | clean | quick | AutoAttack | points | differ | passes of quick | of AutoAttack | ratio | "
        "seconds of quick | of AutoAttack |",
        "|---" * 12 + "|",
    ]
    benchmarks = {}
    for path in sorted(RECORDS.glob("quick*.json")):
        record = json.loads(path.read_text())
        for row in record["rows"]:
            accuracies = (format_accuracy(row[name], row["images"]) for name in ("clean", "quick", "autoattack"))
            points, passes = 100 * (row["quick"] - row["autoattack"]), quick_passes(row)
            counts = (f"{count:,.0f}" for count in passes)
            cells = [row["network"], row["threat"], *accuracies, f"{points:+.2f}", row["differing"], *counts]
            cells.append(f"{passes[0] / passes[1]:.3f}")
            timed = record["device"] != "cpu"  # where other programs share the cores
            cells += [f"{row[f'{name}_seconds']:.1f}" if timed else "–" for name in ("quick", "autoattack")]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        counts = " to ".join(dict.fromkeys(f"{f(r['images'] for r in record['rows']):,}" for f in (min, max)))
        conditions = f"{record['networks']}, the first {counts} test images, {record['precision']}, {record['device']}"
        benchmarks.setdefault(conditions, []).extend(record["rows"])
    return "\n".join([*lines, "", *(f"{name}. {quick_agreement(rows)}" for name, rows in benchmarks.items())])


def quick_passes(row):
    """Forwards and backwards per image of the quick estimate and of AutoAttack."""
    return [sum(sum(stage.values()) for stage in row[f"{name}_passes"].values()) for name in ("quick", "autoattack")]


def quick_agreement(rows):
    """How often the quick estimate differs from AutoAttack, and its share of the passes."""
    points = [100 * (row["quick"] - row["autoattack"]) for row in rows]
    higher, lower = sum(value > 0.3 for value in points), sum(value < -0.3 for value in points)
    passes = [quick_passes(row) for row in rows]
    left = [ours / full for row, (ours, full) in zip(rows, passes) if row["autoattack"] > 0.01]
    whole = sum(ours for ours, _ in passes) / sum(full for _, full in passes)
    return (
        f"Of {len(rows)} rows, quick is more than 0.3 points above AutoAttack in {higher} and below it in {lower}; "
        f"the differences are {min(points):+.2f} to {max(points):+.2f} points, "
        f"{sum(points) / len(points):+.2f} on average. "
        f"It takes {whole:.1%} of AutoAttack's passes over all rows, and {min(left):.1%} to {max(left):.1%} "
        "in a row where AutoAttack leaves more than 1 % of the images."
    )


#: Cells of paper A's table 3 that the README compares.
CELLS_OF_README = ("single/eps16", "dual_bn/eps16")
#: Cells of paper A that the table of accuracies shows, where they were run.
CELLS = (
    *(f"A/table3/{cell}" for cell in ("single/eps16", "dual_bn/eps16", "setup1/eps16", "setup2/eps16")),
    "A/table8/single_kl/eps16",
    *(f"A/table3/{cell}" for cell in ("single/eps8", "dual_bn/eps8", "setup1/eps8", "setup2/eps8")),
)


def cifar10():
    """What hybrid training gives through each branch."""
    rows = ["| eps | norm | branch | clean | PGD-10 | AutoAttack |", "|---|---|---|---|---|---|"]
    paths = [RESULTS / "records" / cell / "fast-seed0.json" for cell in CELLS]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    for record in records:
        values, config = record["values"], record["run"]["config"]
        norm = f"`{config['norm']}`" + (" + KL" if config["objective"].get("kl_weight") else "")
        for branch in dict.fromkeys(name.split("/")[0] for name in values):
            shares = (values[f"{branch}/{attack}"] / 100 for attack in ("clean", "pgd10", "autoattack"))
            accuracies = [format_accuracy(share, TEST_IMAGES[config["data"]["name"]]) for share in shares]
            rows.append(f"| {config['eps']} | {norm} | {branch} | {' | '.join(accuracies)} |")
    run = records[0]["run"]
    config = run["config"]
    return "\n".join(
        [
            *rows,
            "",
            f"Accuracy in percent (95 % interval): CIFAR-10, {config['model']['name']}, {config['epochs']} epochs at "
            f"batch {config['batch_size']} (a shortened schedule), all test images, seed {config['seed']},",
            f"{run['precision']} on one {run['device']}.",
        ]
    )


def outcome():
    """The main results of the README, a sentence each."""
    folder = RESULTS / "records" / "A" / "table3"
    single, dual = (json.loads((folder / cell / "fast-seed0.json").read_text()) for cell in CELLS_OF_README)
    config, single, dual = single["run"]["config"], single["values"], dual["values"]
    record = training("train_*.json")[0]
    row = next(row for row in record["rows"] if row["mode"] == "compiled" and speedups(row))
    reference, ratio = min(speedups(row).items(), key=lambda item: item[1])  # the strongest that was measured
    compared = [record["rows"] for record in training("autoattack_*.json")]
    ours = next(list(rows.values())[-1] for rows in compared if any("official" in name for name in rows))
    lines = [
        f"- **False robustness, measured.** At {config['eps']} PGD-10 reports {single['shared/pgd10']:.1f} % for a",
        f"  single batch norm, but under AutoAttack its accuracy is {single['shared/autoattack']:.1f} %. With a bank "
        f"for each domain, it is {dual['adv/pgd10']:.1f} % under PGD-10 and {dual['adv/autoattack']:.1f} % under "
        f"AutoAttack (CIFAR-10, {config['model']['name']}).",
        f"- **Fast.** Hybrid PGD-10 training of a {row['model']} at batch {row['batch_size']} takes "
        f"{row['epoch_seconds']:.1f} s an epoch on an {record['device']},",
        f"  {ratio:.1f} times faster than {REFERENCES[reference]}.",
        f"  AutoAttack is {ours['speedup']:.1f} times faster than the official code, with the same answer on "
        f"{100 * ours['agreement']:.1f} % of the images.",
    ]
    return "\n".join(lines)


def distances():
    """How far apart the domains lie in networks whose robustness is false and real."""
    parts, pairs = ("accuracy", "sums", "relative_sums"), ("clean-adv", "clean-autoattack", "adv-autoattack")
    found = []
    for path in sorted((RESULTS / "analysis").glob("domain_gap-*.json")):
        record = json.loads(path.read_text())
        if pairs[-1] in record["sums"]:
            values = {f"{part}/{key}": value for part in parts for key, value in record[part].items()}
            found.append((record["conditions"]["config"], record["conditions"]["images"], values))
    for path in sorted((RESULTS / "records" / "C" / "table2").rglob("fast-seed*.json")):
        record = json.loads(path.read_text())
        found.append((record["run"]["config"], record["measures"][0]["options"]["limit"], record["values"]))
    rows = [
        "| network | training | images | clean / PGD / AutoAttack, % | clean – PGD | clean – AutoAttack "
        "| PGD – AutoAttack |",
        "|---" * 7 + "|",
    ]
    for config, images, values in sorted(found, key=lambda each: -each[-1]["sums/clean-adv"]):
        objective = " ".join(str(value) for value in config["objective"].values())
        trained = f"{objective}, {config['eps']}, {config['epochs']} epochs, seed {config['seed']}"
        kinds = ("clean", "adv", "autoattack")
        accuracies = " / ".join(format_accuracy(values[f"accuracy/{kind}"], images) for kind in kinds)
        cells = [f"{values[f'sums/{pair}']:.3g} ({values[f'relative_sums/{pair}']:.4g})" for pair in pairs]
        network = f"{config['model']['name']}, `{config['norm']}`"
        rows.append(f"| {network} | {trained} | {images:,} | {accuracies} | {' | '.join(cells)} |")
    return "\n".join(rows)


#: The plain loops that training is compared with, the weakest first; a record has those that were measured.
REFERENCES = {
    "plain": "a plain loop (TF32, eager)",
    "careful": "a careful loop (bf16, channels-last, eager)",
    "careful_compiled": "a careful loop (bf16, channels-last, `torch.compile`)",
}


def speedups(row):
    """Ratios to the references; older records have the plain loop alone."""
    return row["speedups"] if "speedups" in row else {"plain": row["speedup"]} if row["speedup"] else {}


def conditions(record):
    """Norm, eps and data of a record; older records have no configuration."""
    config = record.get("config", record)
    data = config["data"] if isinstance(config["data"], str) else config["data"]["name"]
    return f"`{config['norm']}`, eps {config['eps']}, {data}, {record['device']}"


def training(*patterns):
    """Records of `advnorm bench train`."""
    return [json.loads(path.read_text()) for pattern in patterns for path in sorted(RECORDS.glob(pattern))]


def trained(records, modes=(*REFERENCES, "eager", "compiled"), order=None, laws=False):
    """Training by the engine and by plain loops: a table for each machine and way to measure."""
    tables = {}
    for record in records:
        where = f"{conditions(record)}, median over {record['steps']} steps"
        rows, notes, own = tables.setdefault(where, ([], [], []))
        rows += [row for row in record["rows"] if row["mode"] in modes]
        notes += record["notes"]
        own.append({**record, "rows": [row for row in record["rows"] if row["mode"] in modes]})
    blocks = []
    for where, (rows, notes, own) in tables.items():
        rows = sorted(rows, key=order) if order else rows
        said = [f"{where}, {_peaks(rows)}.", *dict.fromkeys(notes)]
        blocks.append("\n".join([*_training(rows), "", *said, *(growth_laws(own) if laws else ())]))
    return "\n\n".join(blocks)


def _peaks(rows):
    """The peak of a process, for each number of them: what a share is a share of."""
    peaks = {}
    for row in rows:
        peaks.setdefault(row["processes"], []).append(row["tflops"] / row["share_of_peak"] / row["processes"])
    spans = {
        count: " to ".join(dict.fromkeys(f"{peak:.3g}" for peak in (min(each), max(each))))
        for count, each in sorted(peaks.items())
    }
    first, *others = spans.items()
    peak = f"peak {first[1]} TFLOP/s" + ("" if first[0] == 1 else f" in each of {first[0]} processes")
    return ", ".join([peak, *(f"{span} in each of {count} processes" for count, span in others)])


def _training(rows):
    """The lines of a table of rows, with a column for each setting and reference that occurs."""
    settings = list(dict.fromkeys(name for row in rows for name in row.get("settings", {})))
    references = [name for name in REFERENCES if name == "plain" or any(name in speedups(row) for row in rows)]
    columns = {
        "network": lambda row: row["model"],
        "mode": lambda row: row["mode"],
        "batch": lambda row: row["batch_size"],
        "attack steps": lambda row: row["attack_steps"],
        **({"pixels": lambda row: row.get("image_size", 32)} if _vary(rows, "image_size", 32) else {}),
        **{name: lambda row, name=name: row.get("settings", {}).get(name, "–") or "none" for name in settings},
        "processes": lambda row: row["processes"],
        "images/s": lambda row: f"{row['images_per_second']:,.0f}",
        "an epoch": lambda row: f"{row['epoch_seconds']:,.{2 if row['epoch_seconds'] < 1000 else 0}f} s",
        "of peak": lambda row: f"{row['share_of_peak']:.0%}",
        "memory": lambda row: "–" if row["memory"] is None else f"{row['memory'] / 2**30:.1f} GiB",
        **{f"× {name}": lambda row, name=name: _ratio(speedups(row).get(name)) for name in references},
        **({"cost": lambda row: _ratio(row.get("cost"))} if _vary(rows, "cost", None) else {}),
    }
    lines = [f"| {' | '.join(str(cell(row)) for cell in columns.values())} |" for row in rows]
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines]


def _vary(rows, name, default):
    return len({row.get(name, default) for row in rows}) > 1


def _ratio(value):
    return "–" if value is None else f"{value:.2f}"


def growth_laws(records):
    """The fitted laws, as a table. Older records have none of their own: theirs are fitted to all of them together."""
    from advnorm.bench.growth import Law, fit_laws

    laws = fit_laws([row for record in records if "laws" not in record for row in record["rows"]])
    for record in records:
        modes = {row["mode"] for row in record["rows"]}
        laws += [Law(**law) for law in record.get("laws", ()) if law["fixed"]["mode"] in modes]
    lines = []
    for law in laws:
        usual = {"mode": law.fixed["mode"], "image_size": 32, "processes": 1}
        fixed = ", ".join(f"{name} {value}" for name, value in law.fixed.items() if usual.get(name) != value)
        values = ", ".join(f"{value:g}" for value in law.values)
        lines.append(f"| {law.axis} | {values} | {law.formula} | {law.error:.1%} | {fixed} |")
    head = ["", "| setting x | values | fitted law | largest error | with |", "|---" * 5 + "|"]
    return [*head, *lines] if lines else []


def growth():
    """The engine at its fastest by batch size, attack steps, network and processes."""
    on_gpu = trained(
        training("growth_h200_*.json", "train_h200.json", "train_h200_wrn_34_10.json"),
        modes=("compiled",),
        order=lambda row: (row["model"], row["attack_steps"], row["batch_size"]),
        laws=True,
    )
    return f"{on_gpu}\n\n{trained(training('growth_cpu*.json'), laws=True)}"


def epochs():
    """An epoch of hybrid training by the plain loops and by the engine."""
    found = {}
    for row in (row for record in training("train_*.json") for row in record["rows"]):
        if row["attack_steps"] == 10 and not row.get("settings") and row.get("image_size", 32) == 32:
            found.setdefault((row["model"], row["batch_size"]), {})[row["mode"]] = row
    references = [name for name in REFERENCES if any(name in modes for modes in found.values())]
    head = [
        "hybrid PGD-10 training",
        "batch",
        *(REFERENCES[name] for name in references),
        "advnorm",
        "of bf16 peak",
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for (model, batch_size), modes in found.items():
        ours = modes["compiled"]
        cells = [model, batch_size]
        for name in references:
            ratio = f" ({speedups(ours)[name]:.1f}×)" if name in speedups(ours) else ""
            cells.append(f"{modes[name]['epoch_seconds']:.1f} s{ratio}" if name in modes else "–")
        cells += [f"{ours['epoch_seconds']:.2f} s", f"{ours['share_of_peak']:.0%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    where = conditions(training("train_*.json")[0])
    note = f"Seconds of an epoch of 50,000 images; in brackets how many times faster `advnorm` is. {where}."
    return "\n".join([*lines, "", note])


def parts():
    """Where the time of a step goes."""
    rows = [row for record in training("train_*.json") for row in record["rows"] if row["mode"] == "compiled"]
    rows = [row for row in rows if row["parts"]]
    names = sorted({name for row in rows for name in row["parts"]}, key=lambda name: -rows[-1]["parts"].get(name, 0.0))
    shown = [name for name in names if max(row["parts"].get(name, 0.0) for row in rows) >= 0.5]
    lines = ["| ms of a step | " + " | ".join(f"{row['model']}, batch {row['batch_size']}" for row in rows) + " |"]
    lines.append("|---" * (len(rows) + 1) + "|")
    for name in shown:
        lines.append(f"| {name} | " + " | ".join(f"{row['parts'].get(name, 0.0):.1f}" for row in rows) + " |")
    wholes = [sum(row["parts"].values()) for row in rows]
    rest = [whole - sum(row["parts"].get(name, 0.0) for name in shown) for whole, row in zip(wholes, rows)]
    lines.append("| others | " + " | ".join(f"{value:.1f}" for value in rest) + " |")
    lines.append("| all | " + " | ".join(f"{value:.1f}" for value in wholes) + " |")
    return "\n".join(lines)


def recipe_costs():
    """The files of recipes and what an image costs in each."""
    from advnorm.config import load_config
    from advnorm.training.cost import passes, training_passes

    lines = ["| recipe | objective | norm | eps | epochs | batch | passes an epoch | in all |", "|---" * 8 + "|"]
    for path in sorted((ROOT / "recipes").glob("*.yaml")):
        config = load_config(path)
        objective = " + ".join(part.name for part in (config.objective, config.second_pass) if part is not None)
        cells = [f"`{objective}`", f"`{config.norm}`", config.eps, config.epochs, config.batch_size]
        cells += [f"{passes(config):,.0f}", f"{training_passes(config):,.0f}"]
        lines.append(f"| `{path.stem}` | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def recipes():
    """Medians of each measured recipe, and what each of its ingredients buys."""
    blocks = []
    for path in sorted(RECIPES.glob("*.json")):
        record = json.loads(path.read_text())
        own = record["summary"]["recipe"]["seconds"]
        lines = [
            "| training | seeds | clean | PGD-10 | quick | AutoAttack | points | s | − s | first step, s |",
            "|---" * 10 + "|",
        ]
        for name, row in record["summary"].items():
            accuracies = [
                format_accuracy(row[attack]["median"], record["images"]) if attack in row else "–"
                for attack in ("clean", "pgd10", "quick", "autoattack")
            ]
            cells = [f"`{record['recipe'] if name == 'recipe' else name}`", row["seeds"], *accuracies]
            found, seconds = record["differences"].get(name), row["seconds"]
            points = [] if found is None else [100 * found[key] for key in ("difference", "low", "high")]
            cells.append("{:+.1f} ({:+.1f} to {:+.1f})".format(*points) if points else "")
            cells.append("–" if seconds is None else f"{seconds:,.0f}")
            cells.append("–" if None in (own, seconds) else f"{own - seconds:+,.0f}" if points else "")
            cells.append("–" if row["first_step"] is None else f"{row['first_step']:,.0f}")
            lines.append(f"| {' | '.join(map(str, cells))} |")
        conditions = f"{record['model']}, {record['data']}, {record['images']:,} test images, {record['threat']}"
        conditions = f"Points: the recipe minus the variant under {record['compared']}. {conditions}"
        blocks.append("\n".join([*lines, "", f"{conditions}, {record['device']}, commit {record['commit']}."]))
    return "\n\n".join(blocks) or "No recipe has a record yet."


#: Types in fewer words than error messages use.
SHORT_TYPES = {
    "'": "`",
    "` or `": "`, `",
    "a list whose items are each": "list:",
    "an integer": "integer",
    "a finite number": "number",
    "a printable string": "text",
    "a name, or a mapping with a name and options": "name, or mapping with name and options",
    "a mapping of settings": "mapping",
}


def settings():
    """All settings of a configuration, from their declarations; those of the attack follow ``attack``."""
    from advnorm._core.settings import describe
    from advnorm.config import AttackConfig, Config

    rows = describe(Config)
    after = [row.name for row in rows].index("attack") + 1
    rows[after:after] = [row._replace(name=f"attack.{row.name}") for row in describe(AttackConfig)]
    lines = ["| setting | default | type | meaning |", "|---|---|---|---|"]
    for row in rows:
        words = row.type_words
        for long, short in SHORT_TYPES.items():
            words = words.replace(long, short)
        allowed = f"{words}, in {row.range}" if row.range else words
        default = "" if isinstance(row.default, AttackConfig) else default_words(row.default)
        lines.append(f"| `{row.name}` | {default} | {allowed} | {row.help} |")
    return "\n".join(lines)


def default_words(default):
    """The default of a setting for a table."""
    default = getattr(default, "name", default)
    if default is None or default in ((), {}):
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


@cache
def studies():
    return summarize_studies(RESULTS)


def table3():
    """A/table3 by the paper's protocol, with intervals; a cell without a record is missing."""
    (study,) = (study for study in studies()["studies"] if study["name"] == "A/table3")
    results = {result["protocol"]: result for result in study["results"]}
    found = {}
    for entry in results["paper" if "paper" in results else next(iter(results))]["entries"]:
        shown = "not run"
        if "paper" in results and entry["ours"] is not None:
            shown = f"{entry['ours']:.1f} ({entry['interval'][0]:.1f}–{entry['interval'][1]:.1f})"
            shown += "" if entry["spread"] is None else f" ± {entry['spread']:.1f}"
        paper = "–" if entry["paper"] is None else f"{entry['paper']:.1f}"
        found.setdefault(entry["row"], {})[entry["column"]] = f"{paper} / {shown}"
    columns = list(dict.fromkeys(column for row in found.values() for column in row))
    lines = [f"| printed / ours | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | {' | '.join(cells.get(c, '–') for c in columns)} |" for row, cells in found.items()]
    note = "Percent, in brackets Wilson's 95 % confidence interval, ± the standard deviation over seeds."
    return "\n".join([*lines, "", f"A/table3 by the paper's schedule. {note}"])


def claims():
    """The outcome of all claims, and the number that differs most from print under the paper's own protocol."""
    (study,) = (study for study in studies()["studies"] if study["name"] == "A/table3")
    entries = [entry for result in study["results"] if result["protocol"] == "paper" for entry in result["entries"]]
    measured = [entry for entry in entries if entry["difference"] is not None and entry["interval"]]
    if not measured:
        return outcome_sentence(studies())
    far = max(measured, key=lambda entry: abs(entry["difference"]))
    eps, _, metric = far["column"].rpartition(" ")
    low, high = far["interval"]
    name = {"autoattack": "AutoAttack", "pgd10": "PGD-10"}.get(metric, "no attack")
    return (
        f"{outcome_sentence(studies())} By paper A's own protocol, {far['row'].partition(',')[0]} at {eps} keeps "
        f"{far['ours']:.1f} % ({low:.1f}–{high:.1f}) under {name}, where table 3 prints {far['paper']:g} %."
    )


def surgery():
    """How many networks of the libraries convert, and what did not."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("surgery_*.json"))]
    outcomes = ("converted", "no norms", "rejected", "not built")
    rows = [f"| library | {' | '.join(outcomes)} |", "|---|---|---|---|---|"]
    norms, checks, lines = {}, {}, []
    for record in records:
        for library, counts in record["counts"].items():
            cells = [str(counts.get(outcome, 0)) for outcome in outcomes]
            rows.append(f"| {library} {record['versions'][library]} | {' | '.join(cells)} |")
        for norm, count in record["norms"].items():
            norms[norm] = norms.get(norm, 0) + count
        checks |= record["families"]
        lines += [f"{name}: {reason}" for name, reason in record["failures"].items()]
    used = ", ".join(f"{count:,} `{norm}`" for norm, count in sorted(norms.items(), key=lambda item: -item[1]))
    exact = [check for check in checks.values() if check["routes"] and check["stripped"] and check["loads"]]
    single = sorted(family for family, check in checks.items() if check["mixed"] is None)
    mixing = sorted(family for family, check in checks.items() if check["mixed"] is False and not check["error"])
    unchecked = [f"{family}: {check['error']}" for family, check in checks.items() if check["error"]]
    lines = [
        f"Converted to: {used}.",
        f"{len(exact)} of {len(checks)} families: the smallest network has the same outputs, bit for bit, before the "
        "conversion, on each route and after `strip`, and its state dict loads into the original.",
        f"One domain per forward only, because a norm gets more rows than samples: {', '.join(single) or 'none'}.",
        f"A concatenated batch gives other outputs than its parts in: {', '.join(mixing) or 'none'}.",
        *(f"Not checked: {line}" for line in unchecked),
        *lines,
    ]
    return "\n".join([*rows, "", *(f"- {line}" for line in lines)])


#: Attacks of evaluation records, by the words of a table's head.
ATTACKS = {"pgd10": "PGD-10", "autoattack-bf16": "AutoAttack"}


def accuracies(folder, corruptions=None):
    """Trained networks: accuracy of each branch; ``corruptions``: also that of the analysis of this name."""
    records = [json.loads(path.read_text()) for path in sorted((RESULTS / folder).glob("*.json"))]
    attacks = [name for name in ATTACKS if all(name in record["attacks"] for record in records)]
    trainings = [record["about"]["training"] for record in records]
    settings = {
        "network": [f"`{one['model']['name']}`" for one in trainings],
        "objective": [f"`{one['objective']['name']}`" for one in trainings],
        "norm": [f"`{one['norm']}`" for one in trainings],
        "epochs": [str(one["epochs"]) for one in trainings],
    }
    settings = {name: values for name, values in settings.items() if name == "network" or len(set(values)) > 1}
    head = [*settings, "branch", "clean", *(ATTACKS[name] for name in attacks)]
    more_head, more, more_conditions = corrupted(corruptions) if corruptions else ([], {}, [])
    lines, conditions = [], []
    for record, training, *values in zip(records, trainings, *settings.values()):
        run, images = record["about"]["run"], record["images"]
        for branch, shares in record["accuracy"].items():
            one_branch = branch == "default"
            cells = [format_accuracy(shares[name], images) for name in ("clean", *attacks)]
            more_cells = more.get(run if one_branch else f"{run} ({branch})", [])
            lines.append([*values, "shared" if one_branch else branch, *cells, *more_cells])
        epochs = "" if "epochs" in settings else f", {training['epochs']} epochs"
        search = ", AutoAttack with a bf16 search" * ("autoattack-bf16" in attacks)
        conditions.append(
            f"Accuracy in percent (95 % interval) on {images:,} test images of {training['data']['name']} at "
            f"{record['image_shape'][-1]} pixels, eps {training['eps']}{epochs}{search}, {record['device']}, commit "
            f"{record['commit']}."
        )
    return markdown([*head, *more_head], lines, *dict.fromkeys(conditions), *more_conditions)


def corrupted(name):
    """Columns of an analysis of corruptions: their heads, the cells of each network, and their conditions."""
    record = only_analysis(name)
    networks, images = record["networks"], int(record["images"])
    cells = {
        network: [format_accuracy(score["clean"], images), f"{100 * score['mean']:.1f}"]
        for network, score in networks.items()
    }
    kinds = len(next(iter(networks.values()))["accuracy"])
    words = f"The last two columns use the same {images:,} test images; corrupted is the mean over {kinds} corruptions"
    return ["clean, same images", "corrupted"], cells, [f"{words} and five severities."]


def tradeoff():
    """Accuracies of the mixtures of two branches, with both kinds of statistics in a row."""
    record = only_analysis("tradeoff")
    where, attack, found = record["conditions"], ATTACKS[record["attack"]], {}
    for row in record["rows"]:
        cells = [format_accuracy(row[name], where["images"]) for name in ("clean", "robust")]
        found.setdefault(row["share"], {})[row["statistics"]] = cells
    kinds = list(dict.fromkeys(row["statistics"] for row in record["rows"]))
    head = [f"share of {record['domains'][1]}", *(f"{words}, {kind}" for kind in kinds for words in ("clean", attack))]
    lines = [[f"{share:.1f}", *(cell for kind in kinds for cell in row[kind])] for share, row in found.items()]
    config = where["config"]
    search = " with a bf16 search" * record["attack"].endswith("-bf16")
    conditions = (
        f"Accuracy in percent (95 % interval) on {where['images']:,} test images of {where['trained_on']}: "
        f"{config['model']['name']}, `{config['norm']}`, eps {config['eps']}, {config['epochs']} epochs, {attack}"
        f"{search}, {where['device']}, commit {where['commit']}."
    )
    return markdown(head, lines, conditions)


def only_analysis(name):
    """The record of an analysis that was made once."""
    (path,) = (RESULTS / "analysis").glob(f"{name}-*.json")
    return json.loads(path.read_text())


def markdown(head, lines, *conditions):
    """A table of texts, and its conditions below."""
    rows = [f"| {' | '.join(cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, "", *conditions])


def audited(name, part, earlier=None):
    """The verdict on each classifier of a record, and the score of one part of the gallery.

    ``earlier``: the record of the run before, of which the worst case is shown too.
    """
    record = json.loads((RECORDS / f"{name}.json").read_text())
    before = json.loads((RECORDS / f"{earlier}.json").read_text()) if earlier else None
    lines = [f"| {part.replace('_', ' ')} | called real | false | inconclusive | none |", "|---|---|---|---|---|"]
    found = record["scores"][part]
    lines += [f"| {truth} | {' | '.join(map(str, counts.values()))} |" for truth, counts in found["matrix"].items()]
    mean = sum(row["seconds"] for row in record["rows"].values()) / len(record["rows"])
    lines += [
        "",
        f"Precision of *false* {found['precision']:.0%}, recall {found['recall']:.0%}. {len(record['rows'])} "
        f"classifiers of {record['data']}, {record['images']} images, budget `{record['budget']}`, "
        f"{mean:.0f} s per audit on {record['device']}.",
    ]
    if before:
        first = before["scores"][part]
        lines.append(f"First run: precision {first['precision']:.0%}, recall {first['recall']:.0%}.")
    lines += [
        "",
        "| classifier | part | truth | verdict | clean | PGD-10 "
        f"|{' first worst case |' * bool(before)} worst case | known |",
        "|---|---|---|---|---|---|---|---|" + "---|" * bool(before),
    ]
    for name, row in record["rows"].items():
        # Records from before the blind part have a flag.
        own = row["part"] if "part" in row else "held_out" if row["held_out"] else "fitted"
        shares = [row["clean"], row["pgd10"], row["worst_case"], row["known"]]
        if before:
            shares.insert(2, before["rows"][name]["worst_case"])
        numbers = " | ".join(f"{100 * share:.1f}" for share in shares)
        lines.append(f"| `{name}` | {own.replace('_', ' ')} | {row['truth']} | {row['verdict']} | {numbers} |")
    return "\n".join(lines)


PAGES = {
    "README.md": {"outcome": outcome, "claims": claims},
    "docs/reference/results.md": {"results": lambda: results_markdown(studies()), "table3": table3},
    "docs/reference/configuration.md": {"settings": settings},
    "docs/reference/benchmarks.md": {
        "cifar10": cifar10,
        "epochs": epochs,
        "train": lambda: trained(training("train_*.json")),
        "parts": parts,
        "growth": growth,
        "norms": norms,
        "autoattack": autoattack,
        "quick": quick,
        "recipes": recipes,
        "surgery": surgery,
        "networks": lambda: accuracies("networks"),
        "library-training": lambda: trained(training("library_*.json")),
        "sandwich": lambda: accuracies("norms"),
        "advprop": lambda: accuracies("advprop", corruptions="corruptions"),
    },
    "docs/guides/audit.md": {
        "audit": lambda: audited("audit", "held_out"),
        "audit-blind": lambda: audited("audit_blind", "blind", earlier="audit_blind_first"),
    },
    "docs/guides/recipes.md": {"recipe-costs": recipe_costs},
    "docs/guides/analyze_statistics.md": {"distances": distances, "tradeoff": tradeoff},
}


def rendered(page, text):
    """Return a page with every marked block replaced by its table."""
    for name, table in PAGES[page].items():
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda m, table=table: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)
        assert found == 1, f"{page} has no block for {name}"
    return text


def main():
    changed = False
    for page in PAGES:
        path = ROOT / page
        old = path.read_text()
        new = rendered(page, old)
        changed |= new != old
        if "--check" not in sys.argv[1:]:
            path.write_text(new)
    return int(changed and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
