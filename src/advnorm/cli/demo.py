"""The demonstration: three ways to train on clean and adversarial digits, judged by a weak and by a strong attack."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from advnorm._core.exit_codes import PREEMPTED
from advnorm.config import AttackConfig, Config, Named
from advnorm.data import digits
from advnorm.evaluation import BenchmarkResult, benchmark
from advnorm.evaluation.plan import AS_CALLED, branches
from advnorm.report import BarChart, LineChart, ReportPage, ReportTable, render_page, to_rich_table
from advnorm.threat import ThreatModel
from advnorm.training import Run, train

# At this eps the papers' effect shows, on seeds 0 to 2; at eps 0.2 the three models are nearly alike.
SINGLE = Config(
    norm="bn",
    objective=Named("hybrid"),
    eps=0.35,
    attack=AttackConfig(steps=5),
    epochs=25,
    batch_size=64,
    lr=0.2,
    schedule="one_cycle",
)
DUAL = replace(SINGLE, norm="dual_bn")
KL = replace(SINGLE, objective=Named("kl"))
MODELS = {"single BN": SINGLE, "dual BN": DUAL, "single BN + KL": KL}
#: In plots of branches dual BN's clean one has colour 1.
COLOURS = dict(zip(MODELS, (0, 2, 3)))
#: A weak and a strong attack; what lies between them is robustness that was claimed and is not there.
ATTACKS = {"pgd10": "PGD-10", "autoattack": "AutoAttack"}
QUICK_ATTACKS = {"pgd2": "PGD-2", "pgd10": "PGD-10"}
QUICK_IMAGES = 64
QUICK = "A quick look after 2 epochs: it shows that everything works, and nothing about the methods."
STAGES = {"apgd-ce": "APGD-CE", "apgd-t": "APGD-T", "fab-t": "FAB-T", "square": "Square"}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One branch of one trained model, and the share of the test images that it gets right under each attack."""

    model: str
    branch: str | None
    accuracy: Mapping[str, float]
    stages: Mapping[str, float]  # after each attack of AutoAttack's cascade
    images: int

    @property
    def label(self) -> str:
        return self.model if self.branch is None else f"{self.model}, {self.branch} branch"

    def false_share(self, weak: str, strong: str) -> float | None:
        """Which share of the images that withstand the weak attack falls to the strong one; None where none does."""
        return 1 - self.accuracy[strong] / self.accuracy[weak] if self.accuracy[weak] else None


def run(console: Console, *, out: Path, seed: int = 0, quick: bool = False) -> int:
    """Train, judge, print the table and write the page; the same call goes on after a kill. The exit status."""
    attacks = QUICK_ATTACKS if quick else ATTACKS
    runs, judged, seconds = {}, [], 0.0
    for label, config in MODELS.items():
        config = replace(config, seed=seed)
        config = replace(config, attack=AttackConfig(steps=2), epochs=2) if quick else config
        trained = _trained(console, label, config, out / "runs")
        if not trained.finished:
            console.print("stopped before its end; the same command goes on", highlight=False)
            return PREEMPTED
        result = _judged(console, trained, tuple(attacks), out / "records", limit=QUICK_IMAGES if quick else None)
        runs[label] = trained
        judged += _rows(label, result)
        seconds += trained.record["seconds"] + sum(sum(row.values()) for row in result.seconds.values())
        console.print(f"[green]✓[/] {label}", highlight=False)
    table = accuracy_table(judged, attacks)
    sentences = [QUICK] if quick else findings(judged, attacks)
    page: ReportPage = {
        "title": "How much of the robustness is real?",
        "about": "Three networks learn clean and adversarial digits together (hybrid training). They differ in one "
        "line of their configuration; each is attacked through each of its branches.",
        "lead": sentences,
        "tables": [table],
        "figures": figures(judged, attacks, {label: trained.metrics() for label, trained in runs.items()}),
        "conditions": conditions(next(iter(runs.values())), judged[0].images, attacks, seconds),
        "commands": commands(runs, attacks, out=out, seed=seed, quick=quick),
    }
    path = out / "report.html"
    path.write_text(render_page(page), encoding="utf-8")
    console.print()
    console.print(to_rich_table(table))
    for sentence in sentences:
        console.print(sentence, highlight=False)
    console.print(f"\nplots and conditions: {path}", highlight=False, soft_wrap=True)
    return 0


# -- work --------------------------------------------------------------------------------------------------------------


def _trained(console: Console, label: str, config: Config, out: Path) -> Run:
    folder = out / f"{config.run_name}-seed{config.seed}"
    with _epochs_shown(console, f"{label}: training", folder / "metrics.jsonl", config.epochs):
        return train(config, out=out, device="cpu")  # compiling for a GPU takes longer than all of this


@contextmanager
def _epochs_shown(console: Console, label: str, metrics: Path, epochs: int) -> Iterator[None]:
    """A bar that follows a training by the lines of its metrics, without a line on the terminal per epoch."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Epochs(Progress):
        def get_renderables(self) -> Any:
            for task in self.tasks:
                task.completed = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            return super().get_renderables()

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Epochs(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(label, total=epochs)
        yield


def _judged(console: Console, trained: Run, attacks: Sequence[str], out: Path, *, limit: int | None) -> BenchmarkResult:
    # The last checkpoint: the best one is chosen by PGD, and false robustness looks good to PGD.
    model = trained.model("last")
    config = trained.config
    return benchmark(
        model,
        digits("test"),
        ThreatModel(norm=config.threat, eps=config.eps),
        attacks,
        branches(model) or None,
        record=out / f"{trained.folder.name}.json",
        progress=console.is_terminal,
        seed=config.seed,
        limit=limit,
    )


def _rows(label: str, result: BenchmarkResult) -> list[Judged]:
    return [
        Judged(
            model=label,
            branch=None if route == AS_CALLED else route,
            accuracy=accuracy,
            stages=result.conditions["stages"].get(route, {}).get("autoattack", {}),
            images=result.images,
        )
        for route, accuracy in result.accuracy.items()
    ]


# -- what it says ------------------------------------------------------------------------------------------------------


def accuracy_table(judged: Sequence[Judged], attacks: Mapping[str, str]) -> ReportTable:
    """A row per model and branch; the gap is what the strong attack takes from the weak one's number."""
    weak, strong = attacks
    first, last = attacks.values()
    return {
        "title": f"Accuracy on {judged[0].images} test images (%)",
        "columns": [
            {"label": "model", "kind": "text"},
            {"label": "branch", "kind": "text"},
            {"label": "clean", "kind": "percent"},
            *({"label": label, "kind": "percent"} for label in attacks.values()),
            {"label": "gap", "kind": "points"},
            {"label": "false", "kind": "percent"},
        ],
        "rows": [
            [
                row.model,
                row.branch or "shared",
                row.accuracy["clean"],
                row.accuracy[weak],
                row.accuracy[strong],
                row.accuracy[strong] - row.accuracy[weak],
                "–" if (share := row.false_share(weak, strong)) is None else share,
            ]
            for row in judged
        ],
        "note": f"gap: points from {first} to {last}; false: gap / {first}.",
    }


def findings(judged: Sequence[Judged], attacks: Mapping[str, str]) -> list[str]:
    """What to see in the table, from its numbers, whatever they are."""
    weak, strong = attacks
    single = _of(judged, "single BN")
    others = {
        "dual BN's adversarial branch": _of(judged, "dual BN"),
        "single BN with the KL term": _of(judged, "single BN + KL"),
    }
    share = single.false_share(weak, strong)
    if share is None:
        return [f"Single BN withstands {attacks[weak]} on no image: there is no robustness to call true or false."]
    first = (
        f"Single BN falls from {_percent(single.accuracy[weak])} under {attacks[weak]} to "
        f"{_percent(single.accuracy[strong])} under {attacks[strong]}: "
        f"{_percent(share)} of its robustness was false."
    )
    second = "; ".join(
        f"{name} keeps {_percent(row.accuracy[strong])} of {_percent(row.accuracy[weak])}"
        for name, row in others.items()
    )
    better = [name for name, row in others.items() if _clearly_truer(row, single, weak, strong)]
    if len(better) == len(others):
        third = "As the papers report, more of the robustness is false with a single BN that learns both domains."
        if max(row.false_share(weak, strong) or 0 for row in others.values()) > 0.5:
            third += " Here the others lose more than half of theirs, too."
    elif better:
        third = f"Beyond chance this is better than single BN for {better[0]} only."
    else:
        third = "Neither is better than single BN beyond chance: what the papers report does not show here."
    return [first, f"{second[0].upper()}{second[1:]}.", third]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def _of(judged: Sequence[Judged], model: str) -> Judged:
    """The branch of a model that is meant for adversarial images."""
    return next(row for row in judged if row.model == model and row.branch in (None, "adv"))


def _clearly_truer(row: Judged, single: Judged, weak: str, strong: str) -> bool:
    """Whether less of a model's robustness is false than of single BN's, by two standard errors.

    One image more on each side keeps the error of small counts away from 0 (Agresti and Coull).
    """
    shares, errors = [], []
    for judged in (row, single):
        claimed = round(judged.images * judged.accuracy[weak])
        lost = claimed - round(judged.images * judged.accuracy[strong])
        share = (lost + 1) / (claimed + 2)
        shares.append(share)
        errors.append(math.sqrt(share * (1 - share) / (claimed + 2)))
    return shares[1] - shares[0] > 2 * math.hypot(*errors)


def figures(
    judged: Sequence[Judged], attacks: Mapping[str, str], metrics: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[BarChart | LineChart]:
    """Accuracy by attack, accuracy along AutoAttack, and the held-out accuracies of training."""
    names = {"clean": "clean", **attacks}
    weak, strong = attacks
    drawn: list[BarChart | LineChart] = [
        {
            "kind": "bars",
            "title": "Accuracy, through each branch",
            "series": list(names.values()),
            "rows": [{"label": row.label, "values": [row.accuracy[name] for name in names]} for row in judged],
            "gap": (1, 2),
            "note": f"Hatched: withstands {attacks[weak]}, falls to {attacks[strong]}.",
        }
    ]
    if any(row.stages for row in judged):
        drawn.append(
            {
                "kind": "lines",
                "title": "The stronger the attack, the less is left",
                "x": ["clean", attacks[weak], *STAGES.values()],
                "x_label": "",
                "rows": [
                    {
                        "label": _short(row),
                        "values": [row.accuracy["clean"], row.accuracy[weak], *map(row.stages.get, STAGES)],
                    }
                    for row in judged
                ],
                "note": "From APGD-CE on, each attack of AutoAttack gets the images that the ones before left.",
            }
        )
    first = next(iter(metrics.values()))
    for name, title in (("clean", "clean"), ("pgd10", "PGD-10")):
        drawn.append(
            {
                "kind": "lines",
                "title": f"Held-out accuracy in training, {title}",
                "x": [row["epoch"] for row in first],
                "x_label": "epoch",
                "rows": [
                    {"label": _brief(label), "values": [r["held_out"][name] for r in rows], "colour": COLOURS[label]}
                    for label, rows in metrics.items()
                ],
            }
        )
    return drawn


def _brief(model: str) -> str:
    return "with KL" if model.endswith("KL") else model


def _short(row: Judged) -> str:
    return _brief(row.model) if row.branch is None else f"dual, {row.branch}"


def conditions(trained: Run, images: int, attacks: Mapping[str, str], seconds: float) -> dict[str, str | int | None]:
    """What the numbers hold under."""
    config, record = trained.config, trained.record
    attack = config.build_attack()
    held_out = f"{config.held_out:.0%}" if isinstance(config.held_out, float) else config.held_out
    return {
        "data": f"scikit-learn's digits, 8×8: {record['data']['images']} training images, of them "
        f"{held_out} held out; {images} test images",
        "threat": f"{config.threat}, eps {attack.threat.eps:g} of the pixel range, chosen because the effect shows "
        "there; at 0.2 the models are nearly alike",
        "network": config.model.name,
        "papers": "Towards Understanding Dual BN in Hybrid Adversarial Training; Improving the Accuracy-Robustness "
        "Trade-Off for Dual-Domain Adversarial Training",
        "training": f"{config.epochs} epochs, batch {config.batch_size}, SGD with {config.schedule}, lr {config.lr:g}, "
        f"PGD of {attack.steps} steps; last checkpoint",
        "attacks": f"{', '.join(attacks.values())}; AutoAttack is the standard version with all four attacks"
        if "autoattack" in attacks
        else f"{', '.join(attacks.values())} (quick: no AutoAttack)",
        "seed": f"{config.seed}, one run each",
        "device": f"{record['device']}, {record['threads']} thread(s), float32",
        "versions": f"advnorm {record['advnorm']}, torch {record['torch']}",
        "commit": record["commit"] or "unknown: not run from a repository",
        "time": f"{seconds:.0f} s of training and attacks",
    }


def commands(runs: Mapping[str, Run], attacks: Mapping[str, str], *, out: Path, seed: int, quick: bool) -> list[str]:
    """The whole again, and each part by itself."""
    lines = ["# all of it", f"advnorm demo --out {out} --seed {seed}{' --quick' if quick else ''}"]
    for label, trained in runs.items():
        routes = branches(trained.model("last"))
        options = f" --route {' '.join(routes)}" if routes else ""
        options += f" --seed {seed}{f' --limit {QUICK_IMAGES}' if quick else ''} --device cpu"
        lines += [
            f"# {label}",
            f"advnorm train {trained.folder / 'config.yaml'} --device cpu --out runs",
            f"advnorm evaluate runs/{trained.folder.name} --checkpoint last --attacks {' '.join(attacks)}{options}",
        ]
    audited = next(iter(runs.values())).folder
    return [
        *lines,
        "# is the robustness of the first one real?",
        f"advnorm audit {audited} --checkpoint last --device cpu",
    ]
