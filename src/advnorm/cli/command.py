"""Commands from functions: options are declared once, in a signature or in a dataclass that several verbs share."""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperArgument, TyperCommand, TyperOption

from advnorm._core.errors import AdvnormError, ConfigError, printable
from advnorm._core.exit_codes import FAILED, INTERRUPTED

F = TypeVar("F", bound=Callable[..., "int | None"])
T = TypeVar("T")

#: Where every verb prints its results. Markup is off, because a path may look like markup or like an emoji.
console = Console(markup=False, emoji=False, highlight=False)
#: Metavariables of list options. They decide which words can be a value: one with ``=``, a whole number, or a number.
KEY_VALUE, INTEGERS, NUMBERS = "KEY=VALUE", "INTEGERS", "NUMBERS"
#: The user's own code that this command has imported, for the commands that it prints.
own_code: list[str] = []


@dataclass(frozen=True, kw_only=True)
class Computation:
    """Options of every verb that computes."""

    threads: Annotated[
        int | None,
        typer.Option(min=1, max=256, help="Number of CPU threads. Use 1 on busy cores. Default: OMP_NUM_THREADS."),
    ] = None


def say(text: object, style: str | None = None) -> None:
    """Print a text without breaking long lines, so that paths can be copied."""
    console.print(printable(str(text)), style=style, soft_wrap=True)


def check_copy(path: Path | None, form: str | None = None) -> None:
    """Raise if the file of ``--json`` cannot be written, or is not an earlier copy of a record with this format."""
    from advnorm._core.errors import raise_problems
    from advnorm._core.records import output_problems

    def is_own(record: Mapping[str, Any]) -> bool:
        return record.get("format") == form and (form is not None or "torch" in record)

    raise_problems(output_problems(path, is_own) if path is not None else [])


def write_copy(path: Path | None, result: Any) -> None:
    """Write the record of a printed result to the file of ``--json``, see :func:`check_copy`."""
    from advnorm._core.records import write_json

    if path is not None:
        write_json(path, result.record())
        say(f"record: {path}")


def command(app: typer.Typer, name: str | None = None, *, computes: bool = True) -> Callable[[F], F]:
    """Register a function as a command. Its return value is the exit status; ``None`` is 0.

    A parameter whose type is a dataclass stands for all of its fields: each becomes an option of the command. A command
    that ``computes`` has the option ``--threads``.
    """

    def register(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        own = signature.parameters.values()
        shared: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
        parameters: list[inspect.Parameter] = []
        for parameter in own:
            kind = shared.get(parameter.name)
            parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if kind is None else _parameters(kind)
        if computes:
            parameters += _parameters(Computation)

        @wraps(function)
        def run(**values: Any) -> None:
            if computes and (threads := values.pop("threads")) is not None:
                from advnorm._core.devices import set_threads

                set_threads(threads)
            for group, kind in shared.items():
                values[group] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            try:
                status = function(**values)
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except (EOFError, BrokenPipeError, SystemExit) as error:  # typer leaves with 1, other code with any status
                raise RuntimeError(f"{type(error).__name__}: {error}") from error
            raise typer.Exit(status or 0)

        run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, cls=Command, help=_help(function))(run)
        return function

    return register


def _help(function: Callable[..., Any]) -> str:
    """The docstring, with the commands after "Examples:" in lines of their own at its end."""
    text = inspect.getdoc(function) or ""
    return re.sub(r"\s*Examples?:((?:[^`]*`[^`]+`)+)\.?", _example_lines, text)


def _example_lines(match: re.Match[str]) -> str:
    commands = (" ".join(example.split()) for example in re.findall("`([^`]+)`", match[1]))
    return "\n\n" + "\n".join(["```console", *(f"$ {example}" for example in commands), "```"])


def _parameters(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(kind)
    ]


class Command(TyperCommand):
    """A command whose list options take every value up to the next option: ``--attacks pgd10 autoattack``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if any(word.partition("=")[0] == "--import" for word in args):
            verb = ctx.command_path.removeprefix(ctx.find_root().command_path).strip()
            message, hint = "--import stands before the verb", f"write advnorm --import FILE.py {verb} …"
            raise ConfigError("unknown_name", message, field="--import", hint=hint)
        for before, word in pairwise(["the command", *args]):
            if not word or re.fullmatch("--[a-z-]+=", word):  # a default would replace it
                option = word.rstrip("=") or before
                raise ConfigError("empty", f"empty text after {option}", field=option, hint="set the shell variable")
        return super().parse_args(ctx, self.repeat_list_options(args))

    def repeat_list_options(self, words: Sequence[str]) -> list[str]:
        """Write a list option before each of its values, as click expects it.

        A list ends at a word that cannot be one of its values: no number, no ``key=value``. If a required argument is
        missing after that, the last word of a list is that argument: ``study --seeds 0 1 A/table3``.
        """
        options = {text: p for p in self.params if isinstance(p, TyperOption) for text in (*p.opts, *p.secondary_opts)}
        required = sum(isinstance(p, TyperArgument) and p.required for p in self.params)
        groups: list[list[str]] = []  # an option with its value, or one word
        added: list[list[str]] = []  # groups whose word could also be an argument
        current: TyperOption | None = None
        expects_value = False
        for position, word in enumerate(words):
            if word == "--":
                groups.append(list(words[position:]))
                required -= len(words) - position - 1
                break
            if expects_value:
                groups[-1].append(word)
                expects_value = False
            elif word.startswith("-") and word != "-":
                text, equals, _ = word.partition("=")
                option = options.get(text)
                expects_value = option is not None and not option.is_flag and not equals
                current = option if option is not None and option.multiple else None
                groups.append([word])
            elif current is not None and _can_be_value(current, word):
                groups.append([current.opts[0], word])
                added += [groups[-1]] if current.metavar not in (KEY_VALUE, INTEGERS, NUMBERS) else []
            else:
                current = None
                required -= 1
                groups.append([word])
        for group in added[-required:] if required > 0 else ():
            del group[0]
        return [word for group in groups for word in group]


def _can_be_value(option: TyperOption, word: str) -> bool:
    if option.metavar == KEY_VALUE:
        return "=" in word
    if option.metavar == INTEGERS:
        return word.lstrip("-").isdecimal()
    if option.metavar == NUMBERS:
        return re.fullmatch(r"[0-9.]+(e[-+]?[0-9]+)?", word) is not None
    return True


def run_each(items: Mapping[str, T], action: Callable[[T], int | None], *, quiet: bool = False) -> int:
    """Call an action for each item and return the exit status.

    An action that returns a status other than 0 ends the loop. The error of an item is printed, and the loop continues.
    The error of a single item is raised. So is a wrong setting of the first item, which the others probably share.
    """
    status = 0
    for place, (label, item) in enumerate(items.items(), 1):
        if len(items) > 1 and not quiet:
            say(f"{place} of {len(items)}: {label}", style="bold")
        try:
            if stopped := action(item):
                return stopped
        except AdvnormError as error:
            if len(items) == 1 or (place == 1 and isinstance(error, ConfigError)):
                raise
            say(f"failed: {error}", style="red")
            status = FAILED
    return status


def print_command(purpose: str, *words: object) -> None:
    """Print a follow-up command that can be pasted: quoted for the shell, with the ``--import`` of this one."""
    imports = [word for source in own_code for word in ("--import", source)]
    text = shlex.join(map(str, ["advnorm", *imports, *words]))
    say(f"{purpose}: {text}")
