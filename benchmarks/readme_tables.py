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
    conditions = []
    for path in sorted(RECORDS.glob("autoattack_*.json")):
        record = json.loads(path.read_text())
        for name, row in record["rows"].items():
            beside = [f"{row['speedup']:.2f}×", f"{row['robust']:.2%}", f"{row['agreement']:.1%}"]
            if len(record["rows"]) == 1:
                beside[0] = beside[2] = "–"
            rows.append(f"| {name} | {record['images']:,} | {row['seconds']:.1f} | {' | '.join(beside)} |")
        conditions.append(
            f"The first so many CIFAR-10 test images, {record['model']}, {record['threat']}, {record['device']}, seed "
            f"{record['seed']}."
        )
    return "\n".join([*rows, "", *dict.fromkeys(conditions)])


def cifar10():
    """What hybrid training gives through each branch: the cells of paper A's table 3 at 16/255 that were run."""
    rows = ["| norm | branch | clean | PGD-10 | AutoAttack |", "|---|---|---|---|---|"]
    cells = [RESULTS / f"records/A/table3/{name}/eps16" for name in ("single", "dual_bn", "setup1", "setup2")]
    records = [json.loads(path.read_text()) for cell in cells if (path := cell / "fast-seed0.json").exists()]
    for record in records:
        values, norm = record["values"], record["run"]["config"]["norm"]
        for branch in dict.fromkeys(name.split("/")[0] for name in values):
            accuracies = [f"{values[f'{branch}/{attack}']:.1f}" for attack in ("clean", "pgd10", "autoattack")]
            rows.append(f"| `{norm}` | {branch} | {' | '.join(accuracies)} |")
    run = records[0]["run"]
    config = run["config"]
    return "\n".join(
        [
            *rows,
            "",
            f"CIFAR-10, {config['model']['name']}, Linf eps {config['eps']}, {config['epochs']} epochs at batch "
            f"{config['batch_size']} (a shortened schedule), all test images, one seed,",
            f"{run['precision']} on one {run['device']}.",
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
            f"{record['steps']} steps, peak {record['peak_tflops']:.3g} TFLOP/s.",
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
