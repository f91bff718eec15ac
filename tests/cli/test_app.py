"""The command as a whole: version, help, imports."""

import subprocess
import sys

import pytest
import typer

import advnorm.cli.app
from advnorm import __version__
from support.command import invoke
from support.problems import raises_problem


def test_version():
    assert invoke("--version").output.strip() == f"advnorm {__version__}"


def test_demo_states_its_cost_before_it_starts():
    out = invoke("demo", "--help")
    assert out.exit_code == 0
    assert "a few minutes on two CPU cores" in out.output and "--quick" in out.output


def test_training_from_a_file_imports_no_paper(tmp_path):
    (tmp_path / "tiny.yaml").write_text(
        "epochs: 1\nbatch_size: 512\nattack: {steps: 1}\nheld_out: 0\nvalidate_every: 0\n"
    )
    program = (
        "import sys; sys.argv = ['advnorm', 'train', 'tiny.yaml', '--device', 'cpu']\n"
        "from advnorm.cli import main\n"
        "try: main()\n"
        "except SystemExit as left: assert not left.code, left.code\n"
        "assert not [name for name in sys.modules if name.startswith('advnorm.papers.')]"
    )
    out = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 0, out.stderr


@pytest.mark.parametrize("words", [("ls", "norms", "--import", "parts.py"), ("bench", "norms", "--import=parts.py")])
def test_an_import_after_the_verb_is_an_error_that_names_its_place(words):
    with raises_problem("unknown_name", "--import") as caught:
        invoke(*words)
    assert f"advnorm --import FILE.py {words[0]}" in caught.value.problems[0].hint


def test_the_place_of_an_import_is_named_for_a_module_too():
    command = [sys.executable, "-m", "advnorm", "ls", "norms", "--import", "parts.py"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 2 and "write advnorm --import FILE.py ls …" in out.stderr


def verbs():
    app = typer.main.get_command(advnorm.cli.app.app)
    return [
        (name, *((inner,) if inner else ()))
        for name, verb in app.commands.items()
        for inner in getattr(verb, "commands", [None])
    ]


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_the_help_of_a_verb_shows_examples_in_lines_of_their_own(verb):
    lines = [line.strip() for line in invoke(*verb, "--help").output.splitlines()]
    assert any(line.startswith(("$ advnorm " + " ".join(verb), "$ advnorm --import")) for line in lines)
    assert not any("`" in line for line in lines)


@pytest.mark.parametrize("verb", verbs(), ids=" ".join)
def test_the_help_of_a_verb_shows_every_option_in_full(verb):
    command = typer.main.get_command(advnorm.cli.app.app)
    for name in verb:
        command = command.commands[name]
    shown = invoke(*verb, "--help", width=80).output
    names = [name for option in command.params for name in option.opts if name.startswith("--")]
    assert [name for name in names if f" {name} " not in shown] == []
