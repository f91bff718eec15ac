"""Wall-clock time of a recipe, its accuracy under the whole AutoAttack, and the effect of changed settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, Problem, collect_problems, raise_problems
from advnorm._core.provenance import environment
from advnorm._core.records import digest, read_bytes, writable_problems
from advnorm.analysis.images import create_attack
from advnorm.bench.timing import MeasuredConditions, minimum_problems
from advnorm.bench.training_process import read_wall_clock, train_in_process, training_command
from advnorm.config import Config, load_config
from advnorm.data import data_problems
from advnorm.evaluation.benchmark import benchmark
from advnorm.evaluation.comparison import PairedDifference, compare
from advnorm.evaluation.intervals import accuracy_interval
from advnorm.evaluation.model_branches import branches
from advnorm.evaluation.results import BenchmarkResult
from advnorm.evaluation.target import open_run
from advnorm.threat import ThreatModel
from advnorm.training.cost import passes, training_passes
from advnorm.training.run_folder import Run

#: The attacks on the result of the recipe. AutoAttack decides whether the recipe is robust.
ATTACKS = ("pgd10", "quick", "autoattack")
#: The attacks on variants and other checkpoints. The last one compares variants, with a tenth of AutoAttack's passes.
SHORT_ATTACKS = ATTACKS[:-1]
COMPARED = SHORT_ATTACKS[-1]
#: The name of the recipe itself among its variants.
RECIPE = "recipe"
TIMES = ("seconds", "first_step", "training", "validation")


@dataclass(frozen=True, kw_only=True)
class RecipeVariant:
    """The recipe itself, or the recipe with changed settings, which are the name of the variant."""

    name: str
    overrides: tuple[str, ...]  # of the recipe and of the variant
    config: Config


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """One training: its times in seconds and its accuracies.

    ``seconds`` and ``first_step`` count from the start of its process; they are None if it was interrupted. The
    accuracies are by checkpoint, branch and attack. The first checkpoint is the result; ``evaluation`` has the seconds
    of each attack on it, summed over branches.
    """

    variant: str
    seed: int
    run: str
    device: str
    commit: str | None
    seconds: float | None
    first_step: float | None
    training: float  # without validation and checkpoints
    validation: float
    evaluation: dict[str, float]
    epochs: dict[str, int]  # of the checkpoints
    alarms: int  # epochs in which the monitor warned
    accuracies: dict[str, dict[str, dict[str, float]]]


@dataclass(frozen=True, kw_only=True)
class RecipeBenchmark(MeasuredConditions):
    """Conditions and results of one benchmark. Entries by variant start with ``recipe``, the recipe itself."""

    recipe: str
    text: str  # content of the recipe's file
    overrides: tuple[str, ...]
    digest: str
    model: str
    data: str
    threat: str
    attacks: dict[str, str]
    images: int
    passes: dict[str, dict[str, float]]  # per image, in an epoch after all warm-ups and in all epochs
    branch: dict[str, str] = field(default_factory=dict)  # whose accuracy is compared, by variant
    rows: list[RecipeRow] = field(default_factory=list)
    compared: str = COMPARED
    differences: dict[str, PairedDifference] = field(default_factory=dict)  # recipe minus variant, under ``compared``

    def record(self) -> dict[str, Any]:
        return {**super().record(), "summary": self.summary()}

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return medians over seeds by variant, of accuracies with Wilson's interval for the images of one seed."""
        found: dict[str, dict[str, Any]] = {}
        for name in dict.fromkeys(row.variant for row in self.rows):
            rows = [row for row in self.rows if row.variant == name]
            found[name] = {"seeds": len(rows)}
            for label in TIMES:
                known = [value for row in rows if (value := getattr(row, label)) is not None]
                found[name][label] = median(known) if known else None
            for attack in ("clean", *(ATTACKS if name == RECIPE else SHORT_ATTACKS)):
                middle = median(next(iter(row.accuracies.values()))[self.branch[name]][attack] for row in rows)
                found[name][attack] = {"median": middle, "interval": accuracy_interval(middle, self.images)}
                if attack in ATTACKS:
                    found[name][attack]["seconds"] = median(row.evaluation[attack] for row in rows)
        return found


def bench_recipe(
    file: Path | str,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Sequence[str] = (),
    variants: Sequence[str] = (),
    out: Path | str = "runs",
    data_dir: Path | str | None = None,
    limit: int | None = None,
    device: str | None = None,
    imports: Sequence[str] = (),
    on_row: Callable[[str], object] = lambda row: None,
    on_result: Callable[[RecipeBenchmark], object] = lambda result: None,
) -> RecipeBenchmark:
    """Train a recipe with each seed in a process of its own, as a user would, and evaluate it on the test images.

    ``variants``: texts such as ``"ema=null"`` or ``"schedule=cosine lr=0.2"``, each the recipe with these settings.
    The recipe is evaluated at its best and its last checkpoint, a variant at the best. AutoAttack runs on the best
    checkpoint of the recipe; ``quick`` runs on every evaluated checkpoint and compares the variants. The same call
    resumes: finished trainings and evaluations are read from ``out``. ``limit``: number of test images, spread evenly
    over the data.
    ``imports``: code that the processes import first, as by ``advnorm --import``. ``on_row`` gets the progress,
    ``on_result`` the results after each training.
    """
    planned = plan_variants(file, overrides, variants)
    raise_problems(_run_problems(planned, seeds, out, data_dir, device), "bad benchmark")
    found_device = resolve_device(device)
    evaluation = _Evaluation(
        recipe=planned[0].config, device=found_device, data_dir=data_dir, limit=limit, on_row=on_row
    )
    result: RecipeBenchmark | None = None
    results: dict[str, list[BenchmarkResult]] = {}
    for variant in planned:
        for seed in seeds:
            label = f"{Path(file).stem if variant.name == RECIPE else variant.name}, seed {seed}"
            run = Run(Path(out) / f"{variant.config.run_name}-seed{seed}")
            if not run.finished:
                where: dict[str, Any] = {"out": out, "data_dir": data_dir, "device": device, "imports": imports}
                command = training_command(file, variant.overrides, seed, **where)
                train_in_process(command, run, lambda line, label=label: on_row(f"{label}: {line}"))
            own = variant.name == RECIPE
            found = {
                name: evaluation.evaluate(
                    run, name, ATTACKS if own and not place else SHORT_ATTACKS, f"{label}, {name} checkpoint"
                )
                for place, name in enumerate(_checkpoints(run, both=own))
            }
            chosen = next(iter(found.values()))
            result = result or _without_rows(Path(file), planned, chosen, found_device)
            result.branch[variant.name] = "adv" if "adv" in chosen.routes else chosen.routes[-1]
            result.rows.append(_row(variant, seed, run, found))
            results.setdefault(variant.name, []).append(chosen)
            if not own:
                others = results[variant.name]
                routes = result.branch[RECIPE], result.branch[variant.name]
                compared = compare(results[RECIPE][: len(others)], others, attack=COMPARED, route=routes)
                result.differences[variant.name] = compared.rows[0]
            on_result(result)
    assert result is not None
    return result


def plan_variants(file: Path | str, overrides: Sequence[str], variants: Sequence[str]) -> list[RecipeVariant]:
    """Return the recipe and its variants, or raise one error with the problems of all."""
    recipe = load_config(file, overrides)
    planned = [RecipeVariant(name=RECIPE, overrides=tuple(overrides), config=recipe)]
    problems: list[Problem] = []
    if variants and recipe.name is not None:
        message = "{field} would be shared by the recipe and its variants"
        problems.append(Problem(code="conflict", message=message, field="name", got=recipe.name, hint="omit the name"))
    for text in variants:
        changes = text.split()
        with collect_problems(found := list[Problem]()):
            load_config(file, changes)  # a setting that it sets twice
            merged = {change.partition("=")[0]: change for change in (*overrides, *changes)}
            config = load_config(file, list(merged.values()))
            if any(config.digest == other.config.digest for other in planned):
                raise ConfigError("conflict", "the settings give the same training as the recipe or another variant")
            planned.append(RecipeVariant(name=" ".join(changes), overrides=tuple(merged.values()), config=config))
        problems += [replace(p, place=": ".join(filter(None, (f"variant {text!r}", p.place)))) for p in found]
    raise_problems(problems, "bad variants")
    return planned


def _run_problems(
    planned: Sequence[RecipeVariant],
    seeds: Sequence[int],
    out: Path | str,
    data_dir: Path | str | None,
    device: str | None,
) -> list[Problem]:
    """Return what would prevent a training or its evaluation."""
    problems = [problem for seed in seeds for problem in minimum_problems(0, seeds=seed)]
    if not seeds or len(set(seeds)) < len(seeds):
        message = "{field} must be different numbers, at least one"
        problems.append(Problem(code="conflict", message=message, field="seeds", got=list(seeds)))
    with collect_problems(problems):
        resolve_device(device)
    problems += writable_problems(Path(out) / "run" / "run.json")
    for data in {repr(variant.config.data): variant.config.data for variant in planned}.values():
        for split in ("train", "test"):
            found = data_problems(data.name, split, data_dir, **data.options)
            problems += [problem for problem in found if problem not in problems]
    return problems


@dataclass(frozen=True, kw_only=True)
class _Evaluation:
    """The evaluation of every training: all branches at the recipe's radius."""

    recipe: Config
    device: torch.device
    data_dir: Path | str | None
    limit: int | None
    on_row: Callable[[str], object]

    def evaluate(self, run: Run, checkpoint: str, names: Sequence[str], label: str) -> BenchmarkResult:
        """Evaluate a checkpoint, or read its record in the folder of the run."""
        threat = ThreatModel(norm=self.recipe.threat, eps=self.recipe.eps)
        target = open_run(run, checkpoint=checkpoint, data_dir=self.data_dir, device=self.device)
        attacks = {name: create_attack(name, self.device, threat=threat, seed=0) for name in names}

        def shown(name: str) -> Callable[[int, int], object]:
            return lambda done, total: self.on_row(f"{label}: {name} {100 * done // total} %")

        return benchmark(
            target.model,
            target.data,
            threat,
            {name: replace(attack, progress=shown(name)) for name, attack in attacks.items()},
            branches(target.model) or None,
            limit=self.limit,
            record=run.folder / f"evaluation-{checkpoint}-{digest(attacks, self.limit)[:8]}.json",
            about=target.origin,
        )


def _checkpoints(run: Run, *, both: bool) -> list[str]:
    """Return the checkpoint that is the result, and the last one if it is another and ``both`` are evaluated."""
    chosen, record = run.checkpoint_name(), run.record
    differ = chosen == "best" and record["best"]["step"] != record["last"]["step"]
    return [chosen, "last"] if both and differ else [chosen]


def _without_rows(
    file: Path, planned: Sequence[RecipeVariant], evaluated: BenchmarkResult, device: torch.device
) -> RecipeBenchmark:
    """Return the conditions of the benchmark, with those of its evaluations, and no results yet."""
    recipe = planned[0]
    return RecipeBenchmark(
        device=environment(device)["device"],
        recipe=file.stem,
        text=read_bytes(file).decode(),
        overrides=recipe.overrides,
        digest=recipe.config.digest,
        model=recipe.config.model.name,
        data=recipe.config.data.name,
        threat=str(evaluated.threat),
        attacks=dict(evaluated.attacks),
        images=evaluated.images,
        passes={
            variant.name: {"epoch": passes(variant.config), "all": training_passes(variant.config)}
            for variant in planned
        },
    )


def _row(variant: RecipeVariant, seed: int, run: Run, found: dict[str, BenchmarkResult]) -> RecipeRow:
    record, clock, chosen = run.record, read_wall_clock(run), next(iter(found.values()))
    timing = map(json.loads, read_bytes(run.folder / "timing.jsonl").splitlines())
    return RecipeRow(
        variant=variant.name,
        seed=seed,
        run=run.folder.name,
        device=record["device"],
        commit=record["commit"],
        seconds=clock and clock["seconds"],
        first_step=clock and clock["first_step"],
        training=record["seconds"],
        validation=sum(row["validation_seconds"] for row in timing),
        evaluation={
            attack: sum(row[attack] for row in chosen.seconds.values())
            for attack in ATTACKS
            if attack in chosen.attacks
        },
        epochs={name: record[name]["epoch"] for name in found},
        alarms=sum(row["monitor"]["alarm"] > 0 for row in run.metrics() if "monitor" in row),
        accuracies={
            name: {
                route: {attack: row[attack] for attack in ("clean", *ATTACKS) if attack in row}
                for route, row in result.accuracies.items()
            }
            for name, result in found.items()
        },
    )
