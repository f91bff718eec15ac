"""The command ``advnorm``: one module per verb. Verbs import what they need when they run, so that help is instant."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from advnorm._core.errors import AdvnormError
from advnorm._core.exit_codes import CRASHED, USAGE
from advnorm.cli import analyze, audit, bench, card, demo, evaluate, ls, report, show, study, train
from advnorm.cli.command import command, console, own_code

app = typer.Typer(
    name="advnorm",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Adversarial training in which normalization is the subject.",
)
for verb in (
    ls.ls,
    show.show,
    train.train,
    evaluate.evaluate,
    audit.audit,
    analyze.analyze,
    study.study,
    report.report,
    card.card,
    card.push,
    demo.demo,
):
    command(app)(verb)
app.add_typer(bench.app, name="bench")

#: Errors of the operating system that are reported in one line: no space, no permission, a missing file, a bad disk.
SYSTEM_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOENT,
)


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

        console.print(f"advnorm {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command. An error for the user is one line on standard error, not a traceback."""
    try:
        app()
    except Exception as error:
        if isinstance(error, AdvnormError):
            message = str(error)
        elif isinstance(error, OSError) and error.errno in SYSTEM_ERRORS:
            message = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
        else:
            traceback.print_exc()
            sys.exit(CRASHED)
        Console(stderr=True).print(f"[bold red]error:[/] {escape(message)}", highlight=False, soft_wrap=True)
        sys.exit(USAGE)
