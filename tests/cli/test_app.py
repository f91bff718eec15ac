"""The command as a whole: version, help, exit status of errors and crashes."""

import subprocess
import sys

import pytest

from advnorm import __version__
from advnorm.cli import app as commands
from support.command import invoke


def test_version():
    assert invoke("--version").output.strip() == f"advnorm {__version__}"


def test_demo_states_its_cost_before_it_starts():
    out = invoke("demo", "--help")
    assert out.exit_code == 0
    assert "a few minutes on two CPU cores" in out.output and "--quick" in out.output


def test_an_error_is_one_line_and_exit_status_2():
    command = [sys.executable, "-m", "advnorm", "bench", "norms", "dualbn"]
    out = subprocess.run(command, capture_output=True, text=True, check=False)
    assert out.returncode == 2
    assert out.stderr.startswith("error: ") and out.stderr.count("\n") == 1 and "'dual_bn'" in out.stderr
    assert out.stdout == ""


def test_a_crash_has_its_own_exit_status(monkeypatch, capsys):
    def crash():
        raise RuntimeError("a bug")

    monkeypatch.setattr(commands, "app", crash)
    with pytest.raises(SystemExit) as left:
        commands.main()
    assert left.value.code == 70 and "RuntimeError: a bug" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device", "a.json"), PermissionError(13, "Denied", "b")]
)
def test_an_error_of_the_operating_system_is_one_line(monkeypatch, capsys, error):
    def fail():
        raise error

    monkeypatch.setattr(commands, "app", fail)
    with pytest.raises(SystemExit) as out:
        commands.main()
    assert out.value.code == 2
    assert capsys.readouterr().err.strip() == f"error: {error.filename}: {error.strerror}"


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
