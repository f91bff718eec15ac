"""The verb ``evaluate``: clean and robust accuracy of a run, or of a model from the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advnorm.cli.command import console, print_command, run_each, say
from advnorm.cli.options import EvaluateOptions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from advnorm._core.errors import Problem
    from advnorm.evaluation.results import BenchmarkResult
    from advnorm.evaluation.target import EvaluationData, EvaluationTarget


def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(
            help="One or several targets: a folder (a run, several runs or a saved model), module:function that "
            "returns a model, or timm:NAME with --weights."
        ),
    ],
    options: EvaluateOptions,
    attacks: Annotated[
        list[str] | None,
        typer.Option(help="One or several attacks; see `advnorm ls attacks`. Default: pgd10 autoattack."),
    ] = None,
    route: Annotated[list[str] | None, typer.Option(help="One or several branches. Default for a run: all.")] = None,
) -> int:
    """Measure clean and robust accuracy of runs or of any classifier, for each attack and for their union.

    The record of a run is written to its folder. Exit status: 0 done, 1 one of several targets failed, 2 error,
    70 crash, 75 SIGTERM, 130 Ctrl-C.
    Examples: `advnorm evaluate runs/NAME --attacks pgd10 autoattack --route clean adv`,
    `advnorm evaluate runs/* --attacks pgd10`,
    `advnorm evaluate my_models:build --weights w.safetensors --data cifar10:data --attacks pgd10 autoattack
    --route adv --json result.json`
    """
    from advnorm._core.errors import collect_problems
    from advnorm._core.wrappers import device_of
    from advnorm.attacks.names import parse_name
    from advnorm.evaluation.benchmark import benchmark

    names = attacks or ["pgd10", "autoattack"]
    problems: list[Problem] = []
    for name in names:
        with collect_problems(problems):
            parse_name(name)
    targets = _select_targets([run for target in targets for run in _runs_in(target)], options, problems)
    results: dict[str, BenchmarkResult] = {}

    def evaluate_one(name: str) -> None:
        target = open_target(name, options, problems)
        routes = route or _default_routes(target)
        if hint := faster_search_hint(names, device_of(target.model)):
            say(hint, style="dim")
        record = options.json or default_record_path("evaluation", target, options, names, routes)
        with printing_result(record, lambda result: console.print(result.table(console.width))) as show:
            result = benchmark(
                target.model,
                target.data,
                target.threat,
                names,
                routes,
                about=target.origin,
                **settings(options, record),
            )
            results[name] = result
            show(result)

    status = run_each({target: target for target in targets}, evaluate_one)
    if len(targets) > 1 and results:
        _print_seed_table(results)
    parents = {Path(target).parent for target in targets if (Path(target) / "run.json").is_file()}
    if len(parents) == 1:
        print_command("all results on one page", "report", *parents)
    return status


def _default_routes(target: EvaluationTarget) -> list[str] | None:
    """All branches of a run or saved model; None for a model without branches."""
    from advnorm._core.errors import ConfigError
    from advnorm.evaluation.model_branches import branches

    known = list(branches(target.model))
    if not known:
        return None
    if target.folder is None:
        message = "the model has several branches; choose which to evaluate"
        raise ConfigError("missing_route", message, field="route", hint=f"--route {' '.join(known)}")
    say(f"branches: {', '.join(known)}; --route chooses")
    return known


def _print_seed_table(results: Mapping[str, BenchmarkResult]) -> None:
    """Print the results of several targets, with the spread over seeds."""
    from advnorm.report import to_rich_table
    from advnorm.report.rows import record_rows
    from advnorm.report.runs import seed_table

    rows = [{"run": name, **row} for name, result in results.items() for row in record_rows(result.record())]
    console.print(to_rich_table(seed_table(rows)))


def _select_targets(targets: list[str], options: EvaluateOptions, problems: list[Problem]) -> list[str]:
    """Return the targets that can be evaluated: a pattern such as ``runs/*`` may match other folders and files.

    Raise the problems of several targets, and the ``problems`` so far, before the first evaluation.
    """
    from advnorm._core.errors import Problem, raise_problems

    if len(targets) == 1:
        return targets
    problems = list(problems)
    if options.json:
        message, hint = "several targets cannot share one record", "omit --json: each run keeps its own"
        problems.append(Problem(code="conflict", message=message, field="json", hint=hint))
    folders = [name for name in targets if ":" not in name and not Path(name).is_file()]
    strays = [name for name in folders if not _is_target(Path(name))]
    targets = [name for name in targets if name not in strays and not Path(name).is_file()]
    if missing := [name for name in strays if not targets or not Path(name).exists()]:
        message = f"{', '.join(missing)}: neither a run (run.json) nor a saved model (config.json)"
        hint = "name folders that `advnorm train` or `advnorm card` wrote"
        problems.append(Problem(code="missing_file", message=message, field="targets", hint=hint))
    raise_problems(problems)
    for name in strays:
        say(f"{name} is skipped: it is neither a run nor a saved model", style="yellow")
    return targets


def _is_target(folder: Path) -> bool:
    from advnorm.sharing.pretrained import is_saved_model

    return (folder / "run.json").is_file() or is_saved_model(folder)


def _runs_in(target: str) -> list[str]:
    """The target, or the runs in a folder that holds runs."""
    folder = Path(target)
    runs = [] if _is_target(folder) else sorted(str(file.parent) for file in folder.glob("*/run.json"))
    return runs or [target]


def default_record_path(verb: str, target: EvaluationTarget, options: EvaluateOptions, *choices: Any) -> Path | None:
    """The record's file in the folder of the run, named by weights and settings; None if the target has no folder."""
    from advnorm._core.records import digest, model_fingerprint

    if target.folder is None:
        return None
    batch_size = options.batch_size if options.statistics != "running" else None
    conditions = (options.data, options.statistics, batch_size, options.limit, options.seed)
    key = digest(model_fingerprint(target.model), target.threat, *conditions, *choices)[:8]
    return target.folder / f"{verb}-{target.origin.get('checkpoint', 'saved')}-{key}.json"


def open_target(name: str, options: EvaluateOptions, problems: list[Problem]) -> EvaluationTarget:
    """Open the target of ``evaluate`` and ``audit``: a run, a saved model, a library's network or the user's own model.

    Options replace the run's own settings. One error lists all problems, including the ``problems`` so far.
    """
    from advnorm._core.errors import Problem, collect_problems, raise_problems
    from advnorm._core.records import writable_problems
    from advnorm.evaluation.plan import statistics_problems
    from advnorm.evaluation.target import describe_test_images
    from advnorm.sharing.pretrained import is_saved_model

    problems = [*problems, *statistics_problems(options.statistics)]  # pyright: ignore
    problems += writable_problems(options.json) if options.json else []
    target = None
    own = [label for label in ("weights", "mean", "std") if getattr(options, label)]
    if Path(name).is_dir() and own:
        message, hint = f"{name} has its own weights and input normalization", f"omit --{own[0]}"
        problems.append(Problem(code="conflict", message=message, field=own[0], hint=hint))
    else:
        is_run = Path(name).is_dir() and not is_saved_model(name)
        with collect_problems(problems):
            target = (_open_run if is_run else _open_model)(name, options)
    raise_problems(problems)
    assert target is not None
    say(f"data: {target.origin['data']}: {describe_test_images(target.data)}")
    return target


def _open_run(folder: str, options: EvaluateOptions) -> EvaluationTarget:
    from advnorm.evaluation.target import open_run

    names = ("checkpoint", "data", "data_dir", "eps", "image_size", "device", "seed")
    return open_run(folder, threat_norm=_threat_norm(options), **{name: getattr(options, name) for name in names})


def _open_model(name: str, options: EvaluateOptions) -> EvaluationTarget:
    """Open a saved model, a library's network or the user's own model.

    By default, data and threat are those of the training of a saved model.
    """
    from advnorm._core.errors import ConfigError, collect_problems, raise_problems
    from advnorm.attacks import PGD
    from advnorm.evaluation.target import EvaluationTarget, describe_data, load_test_data
    from advnorm.models.libraries import split_name
    from advnorm.sharing.pretrained import is_saved_model, verify
    from advnorm.threat import ThreatModel

    saved = verify(name) if is_saved_model(name) else None
    training = dict((saved or {}).get("training") or {})
    problems: list[Problem] = []
    model = data = threat = None
    notes: tuple[str, ...] = ()
    own_data = dict(training.get("data") or {"name": None})
    source, own_data = options.data or own_data.pop("name"), {} if options.data else own_data
    with collect_problems(problems):
        sizes = {"image_size": options.image_size} if options.image_size else {}
        if source is not None:
            data = load_test_data(source, options.data_dir, **own_data, **sizes)
    with collect_problems(problems):
        if data is not None or split_name(name) is None:  # a library's network is built for the data
            model, notes = _load_model(name, options, saved, data)
        if source is None:
            hint = "for example --data cifar10:FOLDER or --data digits"
            raise ConfigError("missing_data", "no images to evaluate on", field="data", hint=hint)
    with collect_problems(problems):
        length = options.eps or training.get("eps", "8/255")
        threat = ThreatModel(norm=_threat_norm(options) or training.get("threat", "Linf"), eps=length)
    raise_problems(problems)
    assert model is not None and data is not None and threat is not None
    origin = {
        "model": name,
        "weights": ", ".join([Path(options.weights).name, *notes]) if options.weights else None,
        **({"mean": options.mean, "std": options.std} if options.mean else {}),
        "data": describe_data(str(source)),
        **({"training": training} if training else {}),
    }
    attack = PGD(threat=threat, seed=options.seed)
    folder = Path(name) if saved is not None else None
    return EvaluationTarget(name=name, model=model, data=data, attack=attack, origin=origin, folder=folder)


def _load_model(
    name: str, options: EvaluateOptions, saved: Mapping[str, Any] | None, data: EvaluationData | None
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the model, and notes on what was done to make the weights fit."""
    from advnorm._core.devices import resolve_device
    from advnorm._core.errors import ConfigError
    from advnorm.cli.user_code import load_library_model, load_user_model
    from advnorm.evaluation.target import classes_and_channels
    from advnorm.models.libraries import split_name
    from advnorm.sharing.pretrained import WEIGHTS, from_pretrained

    if options.checkpoint is not None:
        raise ConfigError("conflict", "--checkpoint belongs to the folder of a run", "checkpoint", hint="use --weights")
    device = resolve_device(options.device)
    if split_name(name) is not None and data is not None:
        images = classes_and_channels(data)
        return load_library_model(name, options.weights, images, device, options.mean, options.std)
    if saved is None:
        return load_user_model(name, options.weights, device, options.mean, options.std)
    if not saved.get("model"):
        message = f"{name} holds weights of {saved.get('class')}, a network of somebody's own code"
        hint = f"name the function that builds it: my_module:build --weights {Path(name, WEIGHTS)}"
        raise ConfigError("missing_option", message, field="target", hint=hint)
    return from_pretrained(name, device=device), ()


def _threat_norm(options: EvaluateOptions) -> Any:
    """The norm of the threat in its own spelling; ``ThreatModel`` validates it."""
    from advnorm.threat import THREAT_NORMS

    given = options.threat_norm
    return next((norm for norm in THREAT_NORMS if norm.lower() == str(given).lower()), given)


def settings(options: EvaluateOptions, record: Path | None) -> dict[str, Any]:
    """Return the settings that ``benchmark`` and ``audit`` share."""
    return {
        "batch_size": options.batch_size,
        "record": record,
        "progress": True,
        "seed": options.seed,
        "limit": options.limit,
        "statistics": options.statistics,
    }


@contextmanager
def printing_result(record: Path | None, show: Callable[[Any], object]) -> Iterator[Callable[[Any], object]]:
    """Scope: yield ``show``, and print the path of the record at the end.

    A result whose record cannot be written is shown before the error, because it may have taken days.
    """
    from advnorm._core.records import NotWritable

    label = "read back from" if record is not None and record.exists() else "record:"
    try:
        yield show
    except NotWritable as error:
        if error.result is not None:
            show(error.result)
        raise
    if record is not None:
        say(f"{label} {record}")


def faster_search_hint(attacks: Sequence[str], device: torch.device) -> str | None:
    """Return a hint to use the bf16 search if an attack would be faster with it, else None."""
    from advnorm.attacks.autoattack import CascadeAttack
    from advnorm.attacks.names import parse_name

    if device.type != "cuda":
        return None
    for name in attacks:
        family, given = parse_name(name)
        if issubclass(family.attack, CascadeAttack) and "precision" not in given:
            return f"{name} searches in float32; {name}-bf16 is many times faster, and a float32 forward still decides"
    return None
