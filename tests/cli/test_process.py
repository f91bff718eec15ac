"""The process around a verb: only the work decides its exit status, and printing never loses a result."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import advnorm
from advnorm.cli import app as commands
from advnorm.cli import main, process

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(advnorm.__file__).parent.parent), "OMP_NUM_THREADS": "1"}


def shell(line, cwd, **environment):
    """Run a line in bash, where ``advnorm`` is this package; return its output and the status of each command."""
    start = f'advnorm() {{ {sys.executable} -m advnorm "$@"; }}; '
    words = ["bash", "-c", f"{start}{line}; echo ${{PIPESTATUS[@]}} > statuses"]
    done = subprocess.run(words, cwd=cwd, env=ENVIRONMENT | environment, capture_output=True, timeout=120, check=False)
    statuses = [int(word) for word in (cwd / "statuses").read_text().split()]
    return done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"), statuses


def leave(monkeypatch, verb):
    """Run :func:`main` with a verb in place of the command; return the exit status."""
    monkeypatch.setattr(commands, "app", verb)
    before, handler = (sys.stdout, sys.stderr, sys.unraisablehook), signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            main()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "only the end of the process is left"
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert before == (sys.stdout, sys.stderr, sys.unraisablehook)
    return left.value.code


def raiser(error):
    def verb():
        raise error

    return verb


def test_an_error_is_one_line_and_exit_status_2(tmp_path):
    out, error, statuses = shell("advnorm bench norms dualbn", tmp_path)
    assert statuses == [2] and out == ""
    assert error.startswith("error: ") and error.count("\n") == 1 and "'dual_bn'" in error


class Unprintable(Exception):
    """Text and message of this error raise another error."""

    def __str__(self):
        raise ValueError("no text")


@pytest.mark.parametrize("kind", [RuntimeError, asyncio.CancelledError, GeneratorExit, BaseException, Unprintable])
def test_a_crash_has_its_own_exit_status(monkeypatch, capsys, kind):
    assert leave(monkeypatch, raiser(kind("a bug"))) == 70
    assert kind.__name__ in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device", "a.json"), "a.json: No space left on device"),
        (OSError(36, "File name too long", "nn"), "nn: File name too long"),
        (OSError(40, "Too many levels of symbolic links", "a"), "a: Too many levels of symbolic links"),
        (PermissionError(13, "Denied", "x[/b]y"), "x[/b]y: Denied"),
        (advnorm.ConfigError("code", "two\nlines\x1b[31m and \udcff"), "two lines\\x1b[31m and \\udcff"),
        (MemoryError("Unable to allocate 9 TiB"), "out of memory: Unable to allocate 9 TiB"),
    ],
)
def test_an_error_of_the_user_or_the_system_is_one_line(monkeypatch, capsys, error, line):
    assert leave(monkeypatch, raiser(error)) == 2
    assert capsys.readouterr().err.strip() == f"error: {line}"


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (SystemExit(3), 3), (SystemExit(), 0)])
def test_an_interruption_has_its_own_status(monkeypatch, error, status):
    assert leave(monkeypatch, raiser(error)) == status


OWN = """\
import sys
from torch import nn
class Model(nn.Module):
    def forward(self, x):
        raise {}
def build():
    return Model()
"""


def stop_this_process():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize("place", ["_print_error", "_message", "_flush_output"])
def test_a_signal_while_the_status_is_reported_has_its_own_status(monkeypatch, place):
    monkeypatch.setattr(process, place, lambda *_: stop_this_process())
    assert leave(monkeypatch, raiser(OSError(28, "full"))) == 75


def test_a_signal_during_a_traceback_leaves_the_status(monkeypatch):
    monkeypatch.setattr(process.traceback, "print_exc", stop_this_process)
    assert leave(monkeypatch, raiser(RuntimeError("a bug"))) == 70


def test_a_signal_after_the_output_does_not_change_the_status(tmp_path):
    (tmp_path / "late.py").write_text("import atexit, os\natexit.register(os.kill, os.getpid(), 15)\n")
    assert shell("advnorm --import late.py ls norms", tmp_path)[2] == [0]
    assert shell("advnorm --import late.py bench norms dualbn", tmp_path)[2] == [2]


DESTRUCTOR = """\
import os, time
class Dying:
    def __del__(self):
        os.kill(os.getpid(), {})
        time.sleep(0.05)
Dying()
time.sleep(20)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_in_a_destructor_is_not_lost(tmp_path, number, status):
    (tmp_path / "own.py").write_text(DESTRUCTOR.format(int(number)))
    _, error, statuses = shell("advnorm --import own.py ls norms", tmp_path)
    assert statuses == [status] and error == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [("SystemExit(0)", 70), ("SystemExit(1)", 70), ("__import__('asyncio').CancelledError", 70), ("EOFError", 2)],
)
def test_what_a_model_raises_is_never_a_verdict(tmp_path, error, status):
    (tmp_path / "own.py").write_text(OWN.format(error))
    _, printed, statuses = shell("advnorm audit own:build --data digits --budget quick", tmp_path)
    assert statuses == [status] and ("Traceback" in printed) == (status == 70)


def test_a_reader_who_left_does_not_change_the_status(tmp_path):
    small = "--set epochs=1 batch_size=512 attack.steps=1 held_out=0 validate_every=0 name=x --device cpu"
    for line in ("advnorm --version", "advnorm ls models", "advnorm train --help", f"advnorm train {small}"):
        _, error, statuses = shell(f"{line} | true", tmp_path)
        assert statuses == [0, 0] and error == "", line
    assert (tmp_path / "runs" / "x-seed0" / "record.json").exists()


def test_closed_streams_do_not_change_the_status(tmp_path):
    for streams in (">&-", "2>&-", "<&- >&- 2>&-"):
        assert shell(f"advnorm ls norms {streams}", tmp_path)[2] == [0]
        assert shell(f"advnorm bench norms dualbn {streams}", tmp_path)[2] == [2]


def test_a_full_disk_behind_standard_output_is_an_error(tmp_path):
    _, error, statuses = shell("advnorm ls norms > /dev/full", tmp_path)
    assert statuses == [2] and error == "error: cannot write standard output: No space left on device\n"


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONUTF8": "0"}])
def test_characters_that_the_terminal_lacks_are_replaced(tmp_path, environment):
    out, error, statuses = shell("advnorm ls studies 'A/*'", tmp_path, **environment)
    assert statuses == [0] and "A/table3" in out and error == ""
    _, error, statuses = shell("advnorm ls studies Ω", tmp_path, **environment)
    assert statuses == [2] and error.startswith("error: unknown study ")


@pytest.mark.parametrize("columns", ["0", "1", "20"])
def test_a_narrow_terminal_does_not_change_the_status(tmp_path, columns):
    for line in ("advnorm ls norms", "advnorm show", "advnorm train --help"):
        out, error, statuses = shell(line, tmp_path, COLUMNS=columns)
        assert statuses == [0] and len(out) > 100 and error == "", line


def test_paths_of_any_bytes_are_printed_as_they_are(tmp_path):
    small = "--set epochs=1 batch_size=512 attack.steps=1 held_out=0 validate_every=0 name=x --device cpu"
    out, error, statuses = shell(f"advnorm train {small} --out $'x[/b]:smile:\\xff'", tmp_path)
    assert statuses == [0] and error == "" and "run: x[/b]:smile:\\udcff/x-seed0" in out
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x[/b]:smile:\xff/x-seed0"))
    line = "advnorm evaluate $'x[/b]:smile:\\xff/x-seed0' --attacks pgd1 --limit 20 --json $'[/b]\\xff.json'"
    out, error, statuses = shell(line, tmp_path)
    assert statuses == [0] and folder.is_dir() and "record: [/b]\\udcff.json" in out
    shutil.copytree(folder, folder.parent / os.fsdecode(b"[b]\xfe"))
    line = "advnorm evaluate $'x[/b]:smile:\\xff/[b]\\xfe' --attacks pgd1 --limit 20 --json second.json"
    assert shell(line, tmp_path)[2] == [0]
    assert json.loads((tmp_path / "second.json").read_text())["about"]["run"] == os.fsdecode(b"[b]\xfe")


SLOW = "import time\nprint('ready', flush=True)\ntime.sleep(60)\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_before_a_verb_starts_has_its_own_status(tmp_path, number, status):
    (tmp_path / "slow.py").write_text(SLOW)
    words = [sys.executable, "-m", "advnorm", "--import", "slow.py", "ls", "norms"]
    process = subprocess.Popen(words, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(number)
    assert process.wait(timeout=60) == status
    assert process.stderr.read() == b""


FORKS = """\
import os, signal, time
if not (child := os.fork()):
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
"""


def test_a_worker_process_ends_at_sigterm(tmp_path):
    (tmp_path / "forks.py").write_text(FORKS)
    _, error, statuses = shell("advnorm --import forks.py ls norms", tmp_path)
    assert statuses == [0], error
