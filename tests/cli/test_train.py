"""The command ``advnorm train``."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from advnorm import ConfigError, Run
from advnorm._core.exit_codes import PREEMPTED
from advnorm.cli.app import app
from support.command import invoke
from support.problems import raises_problem
from support.small_runs import ENVIRONMENT, arguments, images_on_disk, small, train


def test_the_command_trains_stops_with_75_and_resumes(tmp_path):
    stopped = CliRunner().invoke(app, arguments(tmp_path, "--max-minutes", "0"))
    assert stopped.exit_code == PREEMPTED and "stopped" in stopped.output
    done = CliRunner().invoke(app, arguments(tmp_path))
    assert done.exit_code == 0, done.output
    assert done.output.startswith("run: ") and done.output.count("\nepoch ") == 3
    assert "best: epoch" in done.output and "advnorm evaluate" in done.output
    again = CliRunner().invoke(app, ["train", str(tmp_path / "runs/small-seed0/config.yaml"), "--out", str(tmp_path)])
    assert again.exit_code == 0
    assert Run(tmp_path / "small-seed0").metrics() == Run(tmp_path / "runs/small-seed0").metrics()


def test_the_printed_evaluate_command_works(tmp_path):
    settings = ["norm=dual_bn", "data=imagefolder", "data.image_size=8", "held_out=4", "batch_size=10", "epochs=1"]
    folder = images_on_disk(tmp_path / "my images")
    (folder / "test").symlink_to("train")
    trained = arguments(tmp_path, "--data-dir", str(folder), "--workers", "0", "--set", *settings)
    done = CliRunner().invoke(app, list(trained))
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output[done.output.index("evaluate it: ") :])[2:]
    assert words[:2] == ["advnorm", "evaluate"] and words[-2:] == ["--data-dir", str(folder)]
    evaluated = CliRunner().invoke(app, [*words[1:], "--attacks", "fgsm", "--device", "cpu"])
    assert evaluated.exit_code == 0, evaluated.output
    assert "branches: clean, adv; --route chooses" in evaluated.output


def test_errors_of_the_command_name_its_options(tmp_path):
    for more, words in (((), "--data-dir"), (("--data-dir", str(tmp_path)), "--download")):
        out = CliRunner().invoke(app, list(arguments(tmp_path, *more, "--set", "data=cifar10")))
        assert isinstance(out.exception, ConfigError)
        assert words in str(out.exception)
    run = train(small(epochs=1), tmp_path)
    out = CliRunner().invoke(app, ["train", str(run.folder)])
    assert f"{run.folder}/config.yaml" in str(out.exception)


def test_a_bad_command_is_one_line_with_status_2_and_writes_nothing(tmp_path):
    command = [sys.executable, "-m", "advnorm", "train", "--set", "norm=dualbn", "epochs=0", "--out", "runs"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: bad configuration: ")
    assert (
        "unknown norm 'dualbn', did you mean 'dual_bn'?" in done.stderr and "epochs must be at least 1" in done.stderr
    )
    assert done.stderr.count("\n") == 1 and list(tmp_path.iterdir()) == []


def terminal(command: list[str], cwd: Path, act) -> tuple[int, str]:
    """Run a command in a terminal of 80 columns; ``act(process, text so far)`` may send signals."""
    lead, follow = pty.openpty()
    environment = {**ENVIRONMENT, "COLUMNS": "80", "LINES": "24", "TERM": "xterm-256color"}
    process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=follow, stderr=follow, stdin=follow)
    os.close(follow)
    text, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([lead], [], [], 0.1)[0]:
            try:
                text += os.read(lead, 65536)
            except OSError:
                break
        act(process, text.decode(errors="replace"))
    os.close(lead)
    return process.wait(timeout=30), text.decode()


def plain(text: str) -> str:
    """Without the codes that move the cursor and set colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_the_bar_fits_into_80_columns_and_an_interrupt_leaves_the_terminal_fine(tmp_path):
    def interrupt(process, text):
        if "left" in re.sub(r"-:--:-- left", "", plain(text)) and not sent:
            sent.append(process.send_signal(signal.SIGINT))

    sent: list[None] = []
    settings = ["norm=dual_bn", "epochs=400", "objective.kl_weight=1"]
    command = [sys.executable, "-m", "advnorm", *arguments(tmp_path, "--set", *settings)]
    code, text = terminal(command, tmp_path, interrupt)
    assert code == 130, text
    assert text.count("\x1b[?25h") == text.count("\x1b[?25l") == 1, "the cursor is hidden and shown again"
    lines = re.split(r"[\r\n]+", plain(text))
    assert max(map(len, lines)) <= 80 and "…" not in text
    bars = [part for part in lines if "left" in part]
    assert re.search(r"epoch \d+/400 .* +\d+/1600 \d:\d\d:\d\d left", bars[-1]), bars[-1]
    assert re.search(
        r"[\d,]+ images/s  loss \d\.\d{3}  clean_ce \d\.\d{3}  adv_ce \d\.\d{3}  kl \d\.\d{3}  clean \d+\.\d%",
        plain(text),
    )
    assert not [part for part in lines if re.fullmatch(r".*[a-z_]+ *", part) and "loss" in part], "a name at its end"
    assert "interrupted; " in text


def test_a_closed_standard_output_does_not_stop_a_training(tmp_path):
    command = [sys.executable, "-m", "advnorm", *arguments(tmp_path, "--set", "epochs=1", "name=quiet")]
    shell = ["sh", "-c", f"{shlex.join(command)} >&-"]
    done = subprocess.run(shell, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert done.returncode == 0 and Run(tmp_path / "runs/quiet-seed0").finished, done.stderr


@pytest.mark.parametrize(
    ("environment", "code"),
    [({"WORLD_SIZE": "2", "RANK": "0"}, "missing_option"), ({"WORLD_SIZE": "two"}, "wrong_type")],
)
def test_processes_without_an_address_are_an_error(tmp_path, monkeypatch, environment, code):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with raises_problem(code, "WORLD_SIZE"):
        invoke("train", "--set", "epochs=1", "--out", tmp_path, "--device", "cpu")
