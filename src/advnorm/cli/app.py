"""The command ``advnorm``: one module per verb. Verbs import what they need when they run, so that help is instant."""

from __future__ import annotations

from typing import Annotated

import typer

from advnorm.cli import analyze, audit, bench, card, compare, demo, evaluate, ls, report, show, study, train
from advnorm.cli.command import command, own_code, say

app = typer.Typer(
    name="advnorm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Train, evaluate and audit adversarially robust networks with norms for several domains.",
)
for verb in (ls.ls, show.show, compare.compare, report.report, card.card, card.push):
    command(app, computes=False)(verb)
for verb in (train.train, evaluate.evaluate, audit.audit, analyze.analyze, study.study, demo.demo):
    command(app)(verb)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def before_every_verb(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    sources: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            envvar="ADVNORM_IMPORT",
            help="A .py file or a module that registers your models, data sets or norms. Write it before the verb.",
        ),
    ] = None,
) -> None:
    own_code[:] = sources or ()
    for source in own_code:
        from advnorm.cli.user_code import import_code

        import_code(source)
    if version:
        from advnorm import __version__

        say(f"advnorm {__version__}")
        raise typer.Exit
