"""Write the tables of the README from the records under results/: no figure there is typed by hand.

python benchmarks/readme_tables.py            # rewrite README.md
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
    """AutoAttack against the official code on the same network and images."""
    rows = ["| AutoAttack standard | seconds | speed-up | robust accuracy | same verdict |", "|---|---|---|---|---|"]
    conditions = []
    for path in sorted(RECORDS.glob("autoattack_*.json")):
        record = json.loads(path.read_text())
        for name, row in record["rows"].items():
            answer = f"{row['robust']:.1%} | {row['agreement']:.1%}"
            rows.append(f"| {name} | {row['seconds']:.1f} | {row['speedup']:.1f}× | {answer} |")
        clean = next(iter(record["rows"].values()))["clean"]
        conditions.append(
            f"{record['images']} CIFAR-10 test images, {record['model']}, {record['threat']}, clean accuracy "
            f"{clean:.1%}, {record['device']}, seed {record['seed']}."
        )
    return "\n".join([*rows, "", *conditions])


def cifar10():
    """What hybrid training gives through each branch, and how fast it is."""
    rows = ["| norm | branch | clean | PGD-10 | AutoAttack | an epoch |", "|---|---|---|---|---|---|"]
    conditions = []
    for folder in sorted(RESULTS.glob("cifar10_eps16/*/")):
        run, judged = (json.loads((folder / name).read_text()) for name in ("record.json", "evaluation.json"))
        timing = [json.loads(line) for line in (folder / "timing.jsonl").read_text().splitlines()]
        epoch = sorted(row["seconds"] for row in timing[1:])[len(timing[1:]) // 2]
        for branch, accuracy in judged["accuracy"].items():
            auto = next(value for name, value in accuracy.items() if name.startswith("autoattack"))
            cells = " | ".join(f"{100 * value:.1f}" for value in (accuracy["clean"], accuracy["pgd10"], auto))
            branch = "shared" if branch == "as called" else branch
            rows.append(f"| `{run['config']['norm']}` | {branch} | {cells} | {epoch:.1f} s |")
        conditions.append((run, judged))
    run, judged = conditions[0]
    config = run["config"]
    return "\n".join(
        [
            *rows,
            "",
            f"CIFAR-10, {config['model']['name']}, Linf eps {config['eps']}, {config['epochs']} epochs at batch "
            f"{config['batch_size']} (a shortened schedule), last checkpoint,",
            f"all {judged['images']:,} test images, one seed, {run['precision']} on one {run['device']}; "
            "PGD-10 with steps of 2.5 eps / 10.",
        ]
    )


def rendered(text):
    """The README with every marked block written anew."""
    for name, table in (("cifar10", cifar10), ("norms", norms), ("autoattack", autoattack)):
        pattern = rf"(<!-- table: {name} -->\n).*?(<!-- end -->)"
        text, found = re.subn(pattern, lambda m, table=table: f"{m[1]}{table()}\n{m[2]}", text, flags=re.DOTALL)
        assert found == 1, f"README.md has no block for {name}"
    return text


def main():
    page = ROOT / "README.md"
    old = page.read_text()
    new = rendered(old)
    if "--check" in sys.argv[1:]:
        return int(new != old)
    page.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
