"""List options take several values and never swallow an argument; options are declared once."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from advnorm.cli.command import INTEGERS, KEY_VALUE, command
from support.problems import raises_problem

app = typer.Typer()
printed: list[object] = []


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Options of two commands."""

    target: Annotated[str, typer.Argument()]
    limit: Annotated[int | None, typer.Option(min=1)] = None


@command(app)
def evaluate(
    options: Shared,
    attacks: Annotated[list[str] | None, typer.Option()] = None,
    route: Annotated[list[str] | None, typer.Option()] = None,
) -> int:
    printed.append((options.target, options.limit, attacks, route))
    return 3


@command(app)
def study(
    name: Annotated[str, typer.Argument()],
    seeds: Annotated[list[int] | None, typer.Option(metavar=INTEGERS)] = None,
) -> None:
    printed.append((name, seeds))


@command(app)
def train(
    source: Annotated[str | None, typer.Argument()] = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar=KEY_VALUE)] = None,
    quick: Annotated[bool, typer.Option("--quick")] = False,
) -> None:
    printed.append((source, overrides, quick))


@command(app)
def analyze(
    name: Annotated[str, typer.Argument()],
    runs: Annotated[list[str], typer.Argument()],
    inputs: Annotated[list[str] | None, typer.Option()] = None,
) -> None:
    printed.append((name, runs, inputs))


def run(words: str) -> tuple[object, int]:
    printed.clear()
    result = CliRunner().invoke(app, words.split())
    return (printed[0] if printed else None), result.exit_code


@pytest.mark.parametrize(
    ("words", "meaning"),
    [
        ("evaluate m:f --attacks pgd10 fgsm --route clean adv", ("m:f", None, ["pgd10", "fgsm"], ["clean", "adv"])),
        ("evaluate m:f --attacks pgd10 --attacks fgsm", ("m:f", None, ["pgd10", "fgsm"], None)),
        ("evaluate m:f --attacks=pgd10 fgsm --limit 5", ("m:f", 5, ["pgd10", "fgsm"], None)),
        ("evaluate --route adv runs/x", ("runs/x", None, None, ["adv"])),
        ("evaluate --route clean adv runs/x --limit 5", ("runs/x", 5, None, ["clean", "adv"])),
        ("evaluate --limit 5 runs/x --route adv", ("runs/x", 5, None, ["adv"])),
        ("evaluate --route adv -- runs/x", ("runs/x", None, None, ["adv"])),
        ("study --seeds 0 1 A/table3", ("A/table3", [0, 1])),
        ("study A/table3 --seeds 0 1", ("A/table3", [0, 1])),
        ("study --seeds 2 A/table3 --seeds 3 4", ("A/table3", [2, 3, 4])),
        ("train --set norm=dual_bn x.yaml", ("x.yaml", ["norm=dual_bn"], False)),
        ("train x.yaml --set norm=dual_bn eps=0.2 --quick", ("x.yaml", ["norm=dual_bn", "eps=0.2"], True)),
        ("train --set a=1 b=2", (None, ["a=1", "b=2"], False)),
        ("train --quick x.yaml", ("x.yaml", None, True)),
        ("analyze --inputs clean adv gap runs/x", ("gap", ["runs/x"], ["clean", "adv"])),
    ],
)  # fmt: skip
def test_a_list_option_takes_its_values_and_leaves_the_arguments(words, meaning):
    found, status = run(words)
    assert found == meaning
    assert status == (3 if words.startswith("evaluate") else 0)


@pytest.mark.parametrize("words", ["evaluate --route runs/x", "study --seeds 0 1", "evaluate"])
def test_a_missing_argument_is_a_usage_error(words):
    assert run(words) == (None, 2)


@pytest.mark.parametrize(
    ("words", "option"), [(["evaluate", ""], "the command"), (["evaluate", "m:f", "--route", ""], "--route"),
                          (["evaluate", "m:f", "--limit="], "--limit"), (["train", "--set", ""], "--set")],
)  # fmt: skip
def test_an_empty_text_does_not_stand_for_the_default(words, option):
    with raises_problem("empty", option):
        raise CliRunner().invoke(app, words).exception


def test_a_verb_that_computes_sets_its_threads(monkeypatch):
    set_to = []
    monkeypatch.setattr("advnorm._core.devices.set_threads", set_to.append)
    assert run("evaluate m:f --threads 3") == (("m:f", None, None, None), 3) and set_to == [3]
    assert run("evaluate m:f --threads 99999") == (None, 2) and run("evaluate m:f")[1] == 3 and set_to == [3]


@pytest.mark.parametrize("error", [EOFError(), BrokenPipeError(32, "Broken pipe"), SystemExit(0), SystemExit(1)])
def test_an_error_that_typer_would_turn_into_a_status_is_a_crash(error):
    own = typer.Typer()

    @command(own)
    def fail() -> None:
        raise error

    assert isinstance(CliRunner().invoke(own, []).exception, RuntimeError)


def test_shared_options_keep_their_limits_and_their_help():
    assert run("evaluate m:f --limit 0") == (None, 2)
    assert "--limit" in CliRunner().invoke(app, ["evaluate", "--help"]).output
