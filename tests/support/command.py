"""Run the command in this process. An error for the user is raised here; in the shell it is one line."""

from __future__ import annotations

from click.testing import Result
from typer.testing import CliRunner

from advnorm import AdvnormError
from advnorm.cli.app import app


def invoke(*words: object, width: int = 200, **environment: str) -> Result:
    """Run ``advnorm WORDS``; raise the error that the user would see."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": str(width), **environment})
    if isinstance(result.exception, AdvnormError):
        raise result.exception
    return result  # pyright: ignore[reportReturnType]
