"""The demonstration: three ways to train on clean and adversarial digits, evaluated by a weak and a strong attack."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from advnorm.config import AttackConfig, Config, Named
from advnorm.data import digits
from advnorm.evaluation import BenchmarkResult, benchmark
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.results import DEFAULT_ROUTE
from advnorm.report import BarChart, LineChart, ReportTable
from advnorm.threat import ThreatModel
from advnorm.training import Run, train

# At this eps the papers' effect appears for seeds 0 to 2; at eps 0.2 the three models are nearly equal.
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
#: Colour 1 belongs to dual BN's clean branch in plots of branches.
COLOURS = dict(zip(MODELS, (0, 2, 3)))
#: A weak and a strong attack. The difference between them is false robustness.
ATTACKS = {"pgd10": "PGD-10", "autoattack": "AutoAttack"}
QUICK_ATTACKS = {"pgd2": "PGD-2", "pgd10": "PGD-10"}
QUICK_IMAGES = 64
QUICK = "Quick run with 2 epochs: it shows that everything works; its numbers do not compare the methods."
STAGES = {"apgd-ce": "APGD-CE", "apgd-t": "APGD-T", "fab-t": "FAB-T", "square": "Square"}


@dataclass(frozen=True, kw_only=True)
class BranchResult:
    """Accuracy of one branch of one trained model under each attack."""

    model: str
    branch: str | None
    accuracy: Mapping[str, float]
    stages: Mapping[str, float]  # accuracy after each attack of AutoAttack's cascade
    images: int

    @property
    def label(self) -> str:
        return self.model if self.branch is None else f"{self.model}, {self.branch} branch"

    def false_share(self, weak: str, strong: str) -> float | None:
        """Share of the images robust to the weak attack that the strong attack fools; ``None`` if there are none."""
        return 1 - self.accuracy[strong] / self.accuracy[weak] if self.accuracy[weak] else None


def train_model(config: Config, out: Path) -> Run:
    """Train one model on the CPU; compiling for a GPU would take longer than the whole demonstration."""
    return train(config, out=out, device="cpu", progress=sys.stderr.isatty())


def evaluate_run(run: Run, attacks: Sequence[str], out: Path, *, limit: int | None) -> BenchmarkResult:
    """Evaluate the last checkpoint: the best one is selected by PGD, which false robustness deceives."""
    model = run.model("last")
    config = run.config
    return benchmark(
        model,
        digits("test"),
        ThreatModel(norm=config.threat, eps=config.eps),
        attacks,
        branches(model) or None,
        record=out / f"{run.folder.name}.json",
        progress=sys.stderr.isatty(),
        seed=config.seed,
        limit=limit,
    )


def branch_results(label: str, result: BenchmarkResult) -> list[BranchResult]:
    return [
        BranchResult(
            model=label,
            branch=None if route == DEFAULT_ROUTE else route,
            accuracy=accuracy,
            stages=result.conditions["stages"].get(route, {}).get("autoattack", {}),
            images=result.images,
        )
        for route, accuracy in result.accuracies.items()
    ]


# -- the page ----------------------------------------------------------------------------------------------------------


def accuracy_table(rows: Sequence[BranchResult], attacks: Mapping[str, str]) -> ReportTable:
    """Return a row per model and branch; the gap is the drop from the weak to the strong attack."""
    weak, strong = attacks
    first, last = attacks.values()
    return {
        "title": f"Accuracy on {rows[0].images} test images (%)",
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
            for row in rows
        ],
        "note": f"gap: points from {first} to {last}; false: gap / {first}.",
    }


def findings(rows: Sequence[BranchResult], attacks: Mapping[str, str]) -> list[str]:
    """Describe the numbers of the table in sentences."""
    weak, strong = attacks
    single = _of(rows, "single BN")
    others = {
        "dual BN's adversarial branch": _of(rows, "dual BN"),
        "single BN with the KL term": _of(rows, "single BN + KL"),
    }
    share = single.false_share(weak, strong)
    if share is None:
        return [f"Single BN is robust to {attacks[weak]} on no image: it claims no robustness."]
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
            third += " Here the others also lose more than half of theirs."
    elif better:
        third = f"Only {better[0]} is better than single BN beyond chance."
    else:
        third = "Neither is better than single BN beyond chance: the papers' effect does not appear here."
    return [first, f"{second[0].upper()}{second[1:]}.", third]


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"


def _of(rows: Sequence[BranchResult], model: str) -> BranchResult:
    """Return the branch of a model for adversarial images."""
    return next(row for row in rows if row.model == model and row.branch in (None, "adv"))


def _clearly_truer(row: BranchResult, single: BranchResult, weak: str, strong: str) -> bool:
    """Whether a smaller share of a model's robustness is false than for single BN, by two standard errors.

    One image is added on each side, so that the error of small counts is not 0 (Agresti and Coull).
    """
    shares, errors = [], []
    for one in (row, single):
        claimed = round(one.images * one.accuracy[weak])
        lost = claimed - round(one.images * one.accuracy[strong])
        share = (lost + 1) / (claimed + 2)
        shares.append(share)
        errors.append(math.sqrt(share * (1 - share) / (claimed + 2)))
    return shares[1] - shares[0] > 2 * math.hypot(*errors)


def figures(
    rows: Sequence[BranchResult], attacks: Mapping[str, str], metrics: Mapping[str, Sequence[Mapping[str, Any]]]
) -> list[BarChart | LineChart]:
    """Return the figures: accuracy by attack, accuracy along AutoAttack, held-out accuracy during training."""
    names = {"clean": "clean", **attacks}
    weak, strong = attacks
    drawn: list[BarChart | LineChart] = [
        {
            "kind": "bars",
            "title": "Accuracy, through each branch",
            "series": list(names.values()),
            "rows": [{"label": row.label, "values": [row.accuracy[name] for name in names]} for row in rows],
            "gap": (1, 2),
            "note": f"Hatched: robust to {attacks[weak]}, fooled by {attacks[strong]}.",
        }
    ]
    if any(row.stages for row in rows):
        drawn.append(
            {
                "kind": "lines",
                "title": "Stronger attacks leave less",
                "x": ["clean", attacks[weak], *STAGES.values()],
                "x_label": "",
                "rows": [
                    {
                        "label": _short(row),
                        "values": [row.accuracy["clean"], row.accuracy[weak], *map(row.stages.get, STAGES)],
                    }
                    for row in rows
                ],
                "note": "From APGD-CE on, each attack of AutoAttack starts from the images that are still robust.",
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


def _short(row: BranchResult) -> str:
    return _brief(row.model) if row.branch is None else f"dual, {row.branch}"


def conditions(run: Run, images: int, attacks: Mapping[str, str], seconds: float) -> dict[str, str | int | None]:
    """Return the conditions of the numbers."""
    config, record = run.config, run.record
    attack = config.build_attack()
    held_out = f"{config.held_out:.0%}" if isinstance(config.held_out, float) else config.held_out
    return {
        "data": f"scikit-learn's digits, 8×8: {record['data']['images']} training images, "
        f"{held_out} of them held out; {images} test images",
        "threat": f"{config.threat}, eps {attack.threat.eps:g} of the pixel range, chosen because the effect appears "
        "there; at 0.2 the models are nearly equal",
        "network": config.model.name,
        "papers": "Towards Understanding Dual BN in Hybrid Adversarial Training; Improving the Accuracy-Robustness "
        "Trade-Off for Dual-Domain Adversarial Training",
        "training": f"{config.epochs} epochs, batch {config.batch_size}, SGD with {config.schedule}, lr {config.lr:g}, "
        f"PGD of {config.attack.steps} steps; last checkpoint",
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
    """Return the commands that repeat the demonstration, as a whole and step by step."""

    def command(*words: object) -> str:
        return shlex.join(map(str, ["advnorm", *words]))

    lines = ["# all of it", command("demo", "--out", out, "--seed", seed, *(["--quick"] if quick else []))]
    for label, run in runs.items():
        routes = branches(run.model("last"))
        options = [*(["--route", *routes] if routes else []), "--seed", seed]
        options += [*(["--limit", QUICK_IMAGES] if quick else []), "--device", "cpu"]
        lines += [
            f"# {label}",
            command("train", run.folder / "config.yaml", "--device", "cpu", "--out", "runs"),
            command("evaluate", f"runs/{run.folder.name}", "--checkpoint", "last", "--attacks", *attacks, *options),
        ]
    audited = next(iter(runs.values())).folder
    return [
        *lines,
        "# is the robustness of the first one real?",
        command("audit", audited, "--checkpoint", "last", "--device", "cpu"),
    ]
