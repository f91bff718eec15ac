"""Write the tables of README.md and docs/speed.md from the records under results/: no figure is typed by hand.

python benchmarks/readme_tables.py            # rewrite them
python benchmarks/readme_tables.py --check    # exit status 1 where it would change
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results"
RECORDS = RESULTS / "bench"


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
    """AutoAttack against the official code on the same network and images, where both ran."""
    rows = [
        "| AutoAttack standard | images | seconds | speed-up | robust accuracy | same verdict |",
        "|---|---|---|---|---|---|",
    ]
    conditions = {}
    for path in sorted(RECORDS.glob("autoattack_*.json")):
        record = json.loads(path.read_text())
        for name, row in record["rows"].items():
            beside = [f"{row['speedup']:.2f}×", f"{row['robust']:.2%}", f"{row['agreement']:.1%}"]
            if len(record["rows"]) == 1:
                beside[0] = beside[2] = "–"
            rows.append(f"| {name} | {record['images']:,} | {row['seconds']:.1f} | {' | '.join(beside)} |")
        conditions[
            f"The first so many CIFAR-10 test images, {record['model']}, {record['threat']}, {record['device']}, seed "
            f"{record['seed']}."
        ] = path
    return "\n".join([*rows, "", *conditions])


def cifar10():
    """What hybrid training gives through each branch, and how fast it is."""
    rows = [
        "| norm | branch | clean | PGD-10 | AutoAttack | peak lr | an epoch |",
        "|---|---|---|---|---|---|---|",
    ]
    conditions = []
    for folder in sorted(RESULTS.glob("cifar10_eps16/*/")):
        run, judged = (json.loads((folder / name).read_text()) for name in ("record.json", "evaluation.json"))
        timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        epoch = sorted(row["seconds"] for row in timing[1:])[len(timing[1:]) // 2]
        for branch, accuracy in judged["accuracy"].items():
            pgd = next(name for name in accuracy if name.startswith("pgd10"))
            auto = next(name for name in accuracy if name.startswith("autoattack"))
            clean, robust, real = (f"{100 * accuracy[name]:.1f}" for name in ("clean", pgd, auto))
            branch = "shared" if branch == "as called" else branch
            size = f"{pgd.removeprefix('pgd10-step')}/255" if pgd != "pgd10" else "2.5 eps / 10"
            cells = [f"`{run['config']['norm']}`", branch, clean, f"{robust} (steps of {size})", real]
            rows.append(f"| {' | '.join([*cells, str(run['config']['lr']), f'{epoch:.1f} s'])} |")
        conditions.append((run, judged))
    run, judged = conditions[0]
    config = run["config"]
    return "\n".join(
        [
            *rows,
            "",
            f"CIFAR-10, {config['model']['name']}, Linf eps {config['eps']}, {config['epochs']} epochs at batch "
            f"{config['batch_size']} (a shortened schedule), last checkpoint,",
            f"all {judged['images']:,} test images, one seed, {run['precision']} on one {run['device']}; the whole "
            "configurations are in the records under `results/cifar10_eps16`.",
        ]
    )


def train(pattern="train_*.json"):
    """Hybrid training by the engine and by a plain loop."""
    paths = sorted(RECORDS.glob(pattern))
    if not paths:
        return "Not measured yet."
    rows = [
        "| network | mode | batch | attack steps | processes | images/s | an epoch | of peak | memory | × plain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    conditions = []
    for path in paths:
        record = json.loads(path.read_text())
        for row in record["rows"]:
            cells = [row["model"], row["mode"], row["batch_size"], row["attack_steps"], row["processes"]]
            cells += [f"{row['images_per_second']:,.0f}", f"{row['epoch_seconds']:.2f} s"]
            cells.append(f"{row['share_of_peak']:.0%}")
            cells.append("–" if row["memory"] is None else f"{row['memory'] / 2**30:.1f} GiB")
            cells.append("–" if row["speedup"] is None else f"{row['speedup']:.2f}")
            rows.append(f"| {' | '.join(map(str, cells))} |")
        conditions += [
            f"`{record['norm']}`, eps {record['eps']}, {record['data']}, {record['device']}, median over "
            f"{record['steps']} steps, peak {record['peak_tflops']:.0f} TFLOP/s.",
            *record["notes"],
        ]
    return "\n".join([*rows, "", *conditions])


PAGES = {
    "README.md": {"cifar10": cifar10, "norms": norms, "autoattack": autoattack},
    "docs/speed.md": {"train": train, "growth": lambda: train("growth_*.json")},
}


def rendered(page, text):
    """A page with every marked block written anew."""
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
