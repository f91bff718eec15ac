"""The clock, the log and metrics files, and the progress display of a training."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.progress import ProgressDisplay, show_progress
from advnorm._core.records import digest, read_bytes, write_atomic

#: First steps, which compile networks, capture attacks and fill caches; the speed leaves them out.
WARM_UP = 5
#: The step after which the time of an epoch is estimated.
ESTIMATE = 20


class MetricsMark(TypedDict):
    """Length and digest of ``metrics.jsonl`` at a checkpoint."""

    bytes: int
    digest: str


class Clock:
    """Seconds of training without validation and checkpoints: total, of the first step, and after the warm-up."""

    #: Attributes that a checkpoint keeps.
    KEPT = ("total", "first_step", "first_step_ended", "steady", "steady_steps")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.total = 0.0
        self.first_step: float | None = None
        self.first_step_ended: float | None = None  # seconds since 1970
        self.steady, self.steady_steps = 0.0, 0
        self._steps = self._counted = 0  # of this attempt, which has its own warm-up
        self.start()

    def start(self) -> None:
        """Start or continue to measure."""
        self._mark = time.perf_counter()

    def step(self) -> None:
        """Count a step; only a few of the first ones wait for the device."""
        self._steps += 1
        if self._steps in (1, WARM_UP, ESTIMATE):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds = self.stop()
            if self.first_step is None:
                self.first_step, self.first_step_ended = seconds, time.time()
            self.start()

    def stop(self) -> float:
        """Add the time since the start and return it. The caller has waited for the device."""
        seconds = time.perf_counter() - self._mark
        self.total += seconds
        if self._counted >= WARM_UP:
            self.steady += seconds
            self.steady_steps += self._steps - self._counted
        self._counted = self._steps
        return seconds

    @property
    def estimates(self) -> bool:
        """Whether this is the step after which the speed is known."""
        return self._steps == ESTIMATE

    def steps_per_second(self) -> float | None:
        """Speed after the warm-up; None for a shorter run."""
        return self.steady_steps / self.steady if self.steady else None


class Journal:
    """``log.txt``, ``metrics.jsonl``, ``timing.jsonl``, and on request TensorBoard events and progress.

    Progress is a bar on a terminal, else a line per epoch and one in half a minute. Only the first process writes
    (``active``).
    """

    def __init__(self, folder: Path, *, active: bool, progress: bool = False, tensorboard: bool = False) -> None:
        self.folder, self._active = folder, active
        self._progress, self._tensorboard = progress and active, tensorboard and active
        self._display = ProgressDisplay()
        self._task = self._display.task("training")
        self._board: Any = None
        if tensorboard:
            _summary_writer()  # a missing package raises before a file is written

    def open(self, stack: ExitStack, *, step: int, steps: int, epochs: int, batch_size: int) -> None:
        """Start the display at ``step`` of ``epochs`` times ``steps`` steps; ``stack`` closes it."""
        self._from, self._began = step, time.monotonic()
        self._steps, self._epochs, self._batch_size = steps, epochs, batch_size
        if self._tensorboard:
            self._board = _summary_writer()(str(self.folder / "tensorboard"), purge_step=step // steps + 1)
            stack.callback(self._board.close)
        stack.callback(setattr, self, "_display", self._display)
        self._display = stack.enter_context(show_progress(self._progress, stream=sys.stdout))
        self._task = self._display.task("training", epochs * steps, completed=step, unit="steps")
        self._display.print(f"run: {self.folder}")

    def log(self, message: str) -> None:
        """Write a line to the log, and to the terminal if progress is shown."""
        if self._active:
            self._append("log.txt", f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}")
            self._display.print(message)

    def row(self, metrics: Mapping[str, Any], timing: Mapping[str, Any]) -> None:
        """Write an epoch: its metrics, which every attempt repeats bit for bit, and its timing."""
        if self._active:
            self._append("metrics.jsonl", json.dumps(metrics, allow_nan=False))
            self._append("timing.jsonl", json.dumps(timing))
            if self._board is not None:
                for name, value in flatten(metrics):
                    self._board.add_scalar(name, value, metrics["epoch"])
            self._task.update(metrics["step"])
        self.log(format_epoch(metrics, timing["seconds"]))

    def show(self, step: int, terms: Mapping[str, Tensor], lr: float) -> None:
        """Show the progress, but rarely, because reading the terms waits for the device."""
        if not self._task.wants_detail():
            return
        rate = (step - self._from) * self._batch_size / max(time.monotonic() - self._began, 1e-9)
        values = format_values((name, float(value)) for name, value in terms.items())
        detail = "  ".join([f"{rate:,.0f} images/s", *values, f"lr {lr:.4g}"])
        epoch = f"epoch {(step - 1) // self._steps + 1}/{self._epochs}"
        self._task.update(step, description=epoch, detail=detail)

    def show_validation(self, step: int) -> None:
        """Show that the training validates, so that a log has a line at least every half minute."""
        self._task.update(description=f"epoch {step // self._steps}/{self._epochs} validation")

    def mark(self) -> MetricsMark:
        """Describe the metrics so far, for a checkpoint: it does not grow with them."""
        content = self._content("metrics.jsonl")
        return {"bytes": len(content), "digest": digest(content)}

    def restore(self, mark: MetricsMark | None) -> None:
        """Reset the files to a checkpoint: later lines are dropped. Without a mark, all are."""
        if not self._active:
            return
        content, expected = self._content("metrics.jsonl"), mark or {"bytes": 0, "digest": digest(b"")}
        kept = content[: expected["bytes"]]
        if digest(kept) != expected["digest"]:
            message = "{field} is not the file that the checkpoint belongs to: it was edited or damaged"
            hint = f"delete {self.folder} to start the run from the beginning"
            raise ConfigError("damaged_file", message, field=str(self.folder / "metrics.jsonl"), hint=hint)
        if kept != content:
            write_atomic(self.folder / "metrics.jsonl", kept)
        timing = self._content("timing.jsonl").splitlines(keepends=True)[: kept.count(b"\n")]
        write_atomic(self.folder / "timing.jsonl", b"".join(line for line in timing if line.endswith(b"\n")))

    def _content(self, name: str) -> bytes:
        path = self.folder / name
        return read_bytes(path) if os.path.lexists(path) else b""

    def _append(self, name: str, text: str) -> None:
        """Append a line. It is on disk before a checkpoint that covers it is. A FIFO without a reader is an error."""
        with open(self.folder / name, "a", encoding="utf-8", errors="backslashreplace", opener=_open_at_once) as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o644)


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        hint = "pip install 'advnorm[tensorboard]', or leave tensorboard out"
        raise ConfigError("missing_package", "TensorBoard is not installed", field="tensorboard", hint=hint) from None
    return SummaryWriter


def format_seconds(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.{0 if seconds >= 10 else 1}f} s"


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of an epoch with names such as ``held_out/clean``."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}/")
        elif name not in ("epoch", "step"):
            yield f"{prefix}{name}", value


def format_values(values: Any) -> Iterator[str]:
    """Names with numbers: accuracies in percent, losses with three digits."""
    for name, value in values:
        if name.endswith("_accuracy"):
            yield f"{name.removesuffix('_accuracy')} {value:.1%}"
        elif name.startswith(("held_out/", "monitor/")):
            attack = name.partition("/")[2]
            yield f"{'training attack' if attack == 'training' else attack} {value:.1%}"
        else:
            yield f"{name} {value:.3f}"


def format_epoch(row: Mapping[str, Any], seconds: float) -> str:
    """The log line of an epoch."""
    values = dict(flatten(row))
    training = {name: value for name, value in values.items() if name != "lr" and "/" not in name}
    text = f"epoch {row['epoch']:>3}  {'  '.join(format_values(training.items()))}"
    for part, words, left_out in (("held_out", "held out", "score"), ("monitor", "monitor", "alarm")):
        shown = {name: values[name] for name in values if name.startswith(f"{part}/") and name != f"{part}/{left_out}"}
        if shown:
            text += f"  | {words}: {'  '.join(format_values(shown.items()))}"
    return f"{text}  | {seconds:.1f} s"
