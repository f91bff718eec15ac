"""A training as a user starts it: in a process of its own, timed from its start, with nothing compiled before."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypedDict

from advnorm._core.errors import AdvnormError
from advnorm._core.exit_codes import OK, PREEMPTED
from advnorm._core.records import write_json
from advnorm._core.shapes import read_record, with_digest
from advnorm.training import checkpoint
from advnorm.training.run_folder import Run

#: The wall-clock times of a run, in its folder.
FILE, FORMAT = "wall_clock.json", "advnorm.wall_clock/1"
#: Seconds between two readings of what a training prints.
READ_EVERY = 0.5
#: Where compiled code is kept between processes: of torch, Triton and the driver.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


class WallClock(TypedDict):
    """Seconds since the start of the one process that trained a run: at its end, and after the first step."""

    seconds: float
    first_step: float


class _WallClockFile(WallClock):
    digest: str


class TrainingFailed(AdvnormError):
    """A training in another process failed, or stopped before its end."""


def training_command(
    file: Path | str,
    overrides: Sequence[str],
    seed: int,
    *,
    out: Path | str,
    data_dir: Path | str | None = None,
    device: str | None = None,
    imports: Sequence[str] = (),
) -> list[str]:
    """Return the command that trains a configuration file with a seed."""
    before = [word for source in imports for word in ("--import", source)]
    given = {"--seed": seed, "--out": out, "--data-dir": data_dir, "--device": device}
    options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
    changes = ["--set", *overrides] if overrides else []
    return [sys.executable, "-m", "advnorm", *before, "train", str(file), *changes, *options]


def train_in_process(command: Sequence[str], run: Run, on_line: Callable[[str], object]) -> None:
    """Run the command, which trains or resumes ``run``, and write its wall-clock times if it trained from the start.

    The process finds no compiled code of earlier ones. ``on_line`` gets each line that it prints.
    """
    from_start = not checkpoint.exists(run.checkpoints, "last")
    # Helpers of the compiler may write there for a moment longer than the training lasts.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        source = str(Path(__file__).parents[2])  # the same package in both processes
        path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, **{name: str(Path(folder, name)) for name in CACHES}}
        output = Path(folder, "output")  # not a pipe, which helpers could keep open after the end
        with output.open("w") as sink, output.open(errors="replace") as printed:
            started, began = time.time(), time.perf_counter()
            process = subprocess.Popen(command, env=environment, stdout=sink, stderr=subprocess.STDOUT)
            try:
                while True:
                    try:
                        status = process.wait(timeout=READ_EVERY)
                        seconds = time.perf_counter() - began
                        break
                    except subprocess.TimeoutExpired:
                        _hand_over(printed, on_line)
                _hand_over(printed, on_line)
            except BaseException:
                process.terminate()  # it stops at a checkpoint
                process.wait()
                raise
        last = next((line for line in reversed(output.read_text(errors="replace").splitlines()) if line.strip()), "")
    if status != OK:
        what = "stopped before its end" if status == PREEMPTED else f"ended with status {status}"
        hint = "the same command resumes" if status == PREEMPTED else ""
        raise TrainingFailed("failed", f"the training of {run.folder} {what}: {last}", field="run", hint=hint)
    if from_start:
        clock: WallClock = {"seconds": seconds, "first_step": run.record["first_step_ended"] - started}
        write_json(run.folder / FILE, with_digest({"format": FORMAT, **clock}))


def _hand_over(printed: Iterable[str], on_line: Callable[[str], object]) -> None:
    for line in printed:
        if line.strip():
            on_line(line.strip())


def read_wall_clock(run: Run) -> WallClock | None:
    """Return the wall-clock times of a run; None if no single process trained it from beginning to end."""
    path = run.folder / FILE
    if not path.exists():
        return None
    record = read_record(path, _WallClockFile, FORMAT, "delete it; the time of this run is then unknown")
    return {"seconds": record["seconds"], "first_step": record["first_step"]}
