"""Commands from functions: options are declared once, in a signature or in a dataclass that several verbs share."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperArgument, TyperCommand, TyperOption

from advnorm._core.errors import AdvnormError, ConfigError
from advnorm._core.exit_codes import FAILED

F = TypeVar("F", bound=Callable[..., "int | None"])
T = TypeVar("T")

#: Where every verb prints its results.
console = Console()
#: Metavariables of list options. They decide which words can be a value: one with ``=``, or a whole number.
KEY_VALUE, INTEGERS = "KEY=VALUE", "INTEGERS"
#: The user's own code that this command has imported, for the commands that it prints.
own_code: list[str] = []


def command(app: typer.Typer, name: str | None = None) -> Callable[[F], F]:
    """Register a function as a command. Its return value is the exit status; ``None`` is 0.

    A parameter whose type is a dataclass stands for all of its fields: each becomes an option of the command.
    """

    def register(function: F) -> F:
        signature = inspect.signature(function, eval_str=True)
        own = signature.parameters.values()
        shared: dict[str, Any] = {p.name: p.annotation for p in own if is_dataclass(p.annotation)}
        parameters: list[inspect.Parameter] = []
        for parameter in own:
            kind = shared.get(parameter.name)
            parameters += [parameter.replace(kind=parameter.KEYWORD_ONLY)] if kind is None else _parameters(kind)

        @wraps(function)
        def run(**values: Any) -> None:
            for group, kind in shared.items():
                values[group] = kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            raise typer.Exit(function(**values) or 0)

        run.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportAttributeAccessIssue]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        app.command(name, cls=Command)(run)
        return function

    return register


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
                added += [groups[-1]] if current.metavar not in (KEY_VALUE, INTEGERS) else []
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
    return True


def run_each(items: Mapping[str, T], action: Callable[[T], int | None], *, quiet: bool = False) -> int:
    """Call an action for each item and return the exit status; a status of the action other than 0 stops.

    The error of a later item is printed, and the remaining items follow. The error of a single item and a wrong setting
    that the first item shows are raised.
    """
    status = 0
    for place, (label, item) in enumerate(items.items(), 1):
        if len(items) > 1 and not quiet:
            console.print(f"[bold]{place} of {len(items)}: {escape(label)}[/]", highlight=False, soft_wrap=True)
        try:
            if stopped := action(item):
                return stopped
        except AdvnormError as error:
            if len(items) == 1 or (place == 1 and isinstance(error, ConfigError)):
                raise
            console.print(f"[red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            status = FAILED
    return status


def print_command(purpose: str, *words: object) -> None:
    """Print a follow-up command that can be pasted: quoted for the shell, with the ``--import`` of this one."""
    imports = [word for source in own_code for word in ("--import", source)]
    text = shlex.join(map(str, ["advnorm", *imports, *words]))
    console.print(f"{purpose}: {text}", highlight=False, markup=False, soft_wrap=True)
