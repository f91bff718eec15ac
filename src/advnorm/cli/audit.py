"""The verb ``audit``: is the robustness of a classifier real?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advnorm.cli.command import console, say
from advnorm.cli.evaluate import default_record_path, open_target, printing_result, settings
from advnorm.cli.options import EvaluateOptions

if TYPE_CHECKING:
    from advnorm.evaluation.verdict import Verdict


def audit(
    target: Annotated[
        str,
        typer.Argument(
            help="Folder of a run or of a saved model, module:function that returns a model, "
            "or timm:NAME with --weights."
        ),
    ],
    options: EvaluateOptions,
    route: Annotated[
        str | None, typer.Option(help="Branch to audit. Default: the branch with the highest PGD-10 accuracy.")
    ] = None,
    budget: Annotated[
        str,
        typer.Option(
            help="quick: 200 images, APGD and FAB with 40 steps, Square with 1000 queries. standard: 1000 images, 100 "
            "steps, 5000 queries. full: all images, also PGD with up to 500 steps, and always a trained copy."
        ),
    ] = "standard",
    surrogate: Annotated[str | None, typer.Option(help="module:function of a model without masking.")] = None,
    surrogate_weights: Annotated[
        str | None, typer.Option(help="Weights of the surrogate, a .safetensors or .pt file. Default: --weights.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the figure to this file (.png, .svg, .pdf).")] = None,
) -> int:
    """Decide whether the robustness of a classifier is real, and show the evidence.

    Exit status: 0 real, 1 false, 2 error, 3 inconclusive, 4 none, 70 crash, 75 SIGTERM, 130 Ctrl-C.
    Examples:
    `advnorm audit my_models:build --weights w.safetensors --data cifar10:data --eps 8/255 --plot audit.png`,
    `advnorm audit runs/NAME --budget quick --json audit.json`,
    `advnorm audit timm:resnet18 --weights w.pth --data images --image-size 128 --eps 4/255`,
    `advnorm audit my_models:quantized --weights q.safetensors --surrogate my_models:build
    --surrogate-weights w.safetensors --data cifar10:data`
    """
    from advnorm._core.devices import resolve_device
    from advnorm._core.errors import Problem, collect_problems
    from advnorm._core.records import writing
    from advnorm.cli.user_code import load_user_model
    from advnorm.evaluation.audit import audit as run_audit
    from advnorm.evaluation.audit import budget_problems
    from advnorm.evaluation.audit_thresholds import LEAST_IMAGES
    from advnorm.evaluation.verdict import plot_problems

    problems = [*budget_problems(budget), *(plot_problems(plot) if plot else [])]
    source = None
    if surrogate is not None:
        with collect_problems(problems, "surrogate"):
            weights = surrogate_weights or options.weights
            source, _ = load_user_model(surrogate, weights, resolve_device(options.device), options.mean, options.std)
    elif surrogate_weights is not None:
        problems.append(Problem("conflict", "--surrogate-weights needs a --surrogate", "surrogate_weights"))
    opened = open_target(target, options, problems)
    images = min(opened.count, options.limit or opened.count)
    if images < LEAST_IMAGES:
        say(f"note: {images} images are too few for the verdict real or false, which needs {LEAST_IMAGES} images")
    record = options.json or default_record_path("audit", opened, options, route, budget, surrogate, surrogate_weights)
    with printing_result(record, _print_verdict) as show:
        verdict = run_audit(
            opened.model,
            opened.data,
            opened.threat,
            route=route,
            budget=budget,  # pyright: ignore[reportArgumentType]  # validated above
            surrogate=source,
            about=opened.origin,
            **settings(options, record),
        )
        show(verdict)
    if plot is not None:
        with writing(plot):
            verdict.plot(plot)
        say(f"plot: {plot}")
    return verdict.exit_code


def _print_verdict(verdict: Verdict) -> None:
    console.print(verdict.table())
    console.print(verdict.evidence_table())
    colour = {"real": "green", "false": "red", "inconclusive": "yellow", "none": "blue"}[verdict.verdict]
    headline, *rest = verdict.summary().splitlines()
    console.print(headline, style=f"bold {colour}")
    console.print("\n".join(rest))
