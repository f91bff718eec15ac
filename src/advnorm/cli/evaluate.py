"""The verb ``evaluate``: clean and robust accuracy of a run, or of a model from the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from advnorm.cli.command import console
from advnorm.cli.options import EvaluateOptions

if TYPE_CHECKING:
    import torch

    from advnorm._core.errors import Problem
    from advnorm.evaluation.target import EvaluationTarget


def evaluate(
    options: EvaluateOptions,
    attacks: Annotated[
        list[str] | None,
        typer.Option(help="One or several attacks; see `advnorm ls attacks`. Default: pgd10 autoattack."),
    ] = None,
    route: Annotated[list[str] | None, typer.Option(help="One or several branches. Default for a run: all.")] = None,
) -> None:
    """Measure clean and robust accuracy of a run or of any classifier, for each attack and for their union.

    Examples: `advnorm evaluate runs/NAME --attacks pgd10 autoattack --route clean adv`,
    `advnorm evaluate my_models:build --weights w.safetensors --data cifar10:data --attacks pgd10 autoattack
    --route adv --json result.json`
    """
    from advnorm._core.errors import ConfigError, collect_problems
    from advnorm._core.wrappers import device_of
    from advnorm.attacks.names import parse_name
    from advnorm.evaluation.benchmark import benchmark
    from advnorm.evaluation.model_branches import branches

    names = attacks or ["pgd10", "autoattack"]
    problems: list[Problem] = []
    for name in names:
        with collect_problems(problems):
            parse_name(name)
    target = open_target(options, problems)
    known = branches(target.model)
    if known and not route:
        if target.folder is None:
            message = "the model has several branches; choose which to evaluate"
            raise ConfigError("missing_route", message, field="route", hint=f"--route {' '.join(known)}")
        route = list(known)
        console.print(f"branches: {', '.join(known)}; --route chooses", highlight=False)
    if hint := faster_search(names, device_of(target.model)):
        console.print(hint, style="dim", highlight=False)
    with printing_result(options.json, lambda result: console.print(result.table(console.width))) as show:
        show(
            benchmark(
                target.model, target.data, target.threat, names, route or None, about=target.origin, **settings(options)
            )
        )


def open_target(options: EvaluateOptions, problems: list[Problem]) -> EvaluationTarget:
    """Open what ``evaluate`` and ``audit`` evaluate: a run, or the user's model with the given data and threat.

    Options replace what a run contains. One error lists everything that is wrong, with the ``problems`` so far.
    """
    from advnorm._core.devices import resolve_device
    from advnorm._core.errors import ConfigError, collect_problems, raise_problems
    from advnorm._core.records import writable_problems
    from advnorm.attacks import PGD
    from advnorm.cli.user_code import load_user_model
    from advnorm.evaluation.plan import statistics_problems
    from advnorm.evaluation.target import EvaluationTarget, describe_data, load_test_data, open_run
    from advnorm.threat import THREAT_NORMS, ThreatModel

    problems += statistics_problems(options.statistics)  # pyright: ignore
    problems += writable_problems(options.json) if options.json else []
    given = options.threat_norm
    threat_norm = next((name for name in THREAT_NORMS if name.lower() == str(given).lower()), given)
    target = None
    if Path(options.target).is_dir():
        with collect_problems(problems):
            if options.weights is not None:
                message = f"{options.target} is a run with its own weights"
                raise ConfigError("conflict", message, field="weights", hint="omit --weights, or use --checkpoint")
            target = open_run(
                options.target,
                checkpoint=options.checkpoint,
                data=options.data,
                data_dir=options.data_dir,
                threat_norm=threat_norm,  # pyright: ignore[reportArgumentType]  # validated there
                eps=options.eps,
                device=options.device,
                seed=options.seed,
            )
    else:
        model = data = threat = None
        with collect_problems(problems):
            if options.checkpoint is not None:
                message = "--checkpoint belongs to the folder of a run"
                raise ConfigError("conflict", message, field="checkpoint", hint="use --weights")
            model = load_user_model(options.target, options.weights, resolve_device(options.device))
        with collect_problems(problems):
            threat = ThreatModel(norm=threat_norm or "Linf", eps=options.eps or "8/255")  # pyright: ignore[reportArgumentType]
        with collect_problems(problems):
            if options.data is None:
                hint = "for example --data cifar10:FOLDER or --data digits"
                raise ConfigError("missing_data", "no images to evaluate on", field="data", hint=hint)
            data = load_test_data(options.data, options.data_dir)
        if model is not None and data is not None and threat is not None:
            origin = {
                "model": options.target,
                "weights": options.weights.name if options.weights else None,
                "data": describe_data(str(options.data)),
            }
            attack = PGD(threat=threat, seed=options.seed)
            target = EvaluationTarget(name=options.target, model=model, data=data, attack=attack, origin=origin)
    raise_problems(problems)
    assert target is not None
    return target


def settings(options: EvaluateOptions) -> dict[str, Any]:
    """Return the settings that ``benchmark`` and ``audit`` share."""
    return {
        "batch_size": options.batch_size,
        "record": options.json,
        "progress": True,
        "seed": options.seed,
        "limit": options.limit,
        "statistics": options.statistics,
    }


@contextmanager
def printing_result(record: Path | None, show: Callable[[Any], object]) -> Iterator[Callable[[Any], object]]:
    """Scope: shows a result and prints where its record is.

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
        console.print(f"{label} {record}", highlight=False, markup=False, soft_wrap=True)


def faster_search(attacks: Sequence[str], device: torch.device) -> str | None:
    """Return a hint at the bf16 search of AutoAttack, if one of the attacks would gain from it."""
    from advnorm.attacks.names import ATTACKS, parse_name

    if device.type != "cuda":
        return None
    for name in attacks:
        family, given = parse_name(name)
        if family is ATTACKS.get("autoattack") and "precision" not in given:
            return f"{name} searches in float32; {name}-bf16 is many times faster, and a float32 forward still decides"
    return None
