"""``train``: from a configuration to a finished run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch

from advnorm._core.errors import AdvnormError, ConfigError, Description, first_line, raise_problems
from advnorm._core.provenance import environment
from advnorm._core.settings import Setting, convert_options
from advnorm.config import Config, Named
from advnorm.data import as_image_data, load
from advnorm.training.build import data_properties
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.ranks import TrainingError, enter_ranks
from advnorm.training.run_folder import Run


def train(
    config: Config,
    *,
    seed: int | None = None,
    out: Path | str = "runs",
    data: Any = None,
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
    download: bool = False,
    workers: Annotated[int | None, Setting("Number of processes.", "[0, inf)")] = None,
    max_minutes: Annotated[float | None, Setting("Minutes.", "[0, inf)")] = None,
    checkpoint_minutes: Annotated[float, Setting("Minutes.", "[0, inf)")] = 10.0,
    progress: bool = False,
    tensorboard: bool = False,
) -> Run:
    """Train a configuration in a subfolder of ``out``; the same call resumes from the last checkpoint.

    A resumed run ends with the same bits as an uninterrupted one, on the same device (CUDA: with ``deterministic``)
    and with as many processes and CPU threads.

    Args:
        seed: Replaces the seed of the configuration.
        out: Parent of one folder per configuration and seed. Nothing is written before all checks have passed.
        data: Training images instead of the configuration's: a ``torch.utils.data.Dataset``, two tensors, or what
            ``advnorm.data.load`` returns. Images are in [0, 1]. All are read into memory.
        data_dir: Folder that contains the data set.
        device: Default: CUDA if available, else the CPU.
        download: Fetch a missing data set.
        workers: Processes that decode image files; by default one per core, 4 at most.
        max_minutes: Stop at a checkpoint after this time. SIGTERM does the same; then ``run.finished`` is False.
            Ctrl-C stops at a checkpoint and raises ``KeyboardInterrupt``; a second one stops at once. If SIGTERM comes
            after the last step, the process sends it to itself again, for the caller's handler.
        checkpoint_minutes: Time between checkpoints within an epoch. An epoch also ends with a checkpoint if the last
            checkpoint is older than this time or than half a minute.
        progress: Show a bar on a terminal, else a line per epoch and one every half minute.
        tensorboard: Write TensorBoard events.

    Under ``torchrun`` every process calls this, and all of them must see ``out``.
    """
    began = time.monotonic()
    _validate(config, workers=workers, max_minutes=max_minutes, checkpoint_minutes=checkpoint_minutes)
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    if data is not None:
        config, data = dataclasses.replace(config, data=Named("given")), as_image_data(data)
    run = Run(Path(out) / f"{config.run_name}-seed{config.seed}")
    with _system_errors_translated(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        ranks = stack.enter_context(enter_ranks(device))
        if data is None:
            read = partial(load, config.data.name, "train", data_dir, download=download, **config.data.options)
            if download and ranks.world > 1:  # by the first process; the others find the files
                ranks.run_on_lead(read)
            data = read()
        about = data_properties(data)
        ranks.run_on_lead(lambda: run.check(config, about))
        if ranks.any(run.finished):
            return run
        journal = Journal(run.folder, active=ranks.lead, progress=progress, tensorboard=tensorboard)
        loop = TrainingLoop(run, config.scaled(), data, ranks, journal, workers=workers)
        start: dict[str, Any] = {"advnorm": environment(ranks.device)["advnorm"]}
        start |= {"weights_fingerprint": loop.weights_fingerprint} if loop.weights_fingerprint else {}
        ranks.run_on_lead(lambda: stack.enter_context(run.claimed(config, about, **start)))
        if ranks.any(run.finished):  # by another process, meanwhile
            return run
        stack.push(partial(_log_failure, journal))
        loop.run(
            until=math.inf if max_minutes is None else began + 60 * max_minutes,
            checkpoint_seconds=60 * checkpoint_minutes,
        )
    loop.signals.pass_on(finished=run.finished)
    return run


def _validate(config: object, **settings: object) -> None:
    if not isinstance(config, Config):
        where = repr(config) if isinstance(config, str) else "..."
        message = "train needs a Config"
        hint = f"read a file with advnorm.load_config({where}), a study's cell with advnorm.studies.get({where})"
        raise ConfigError("wrong_type", message, field="config", got=Description(type(config).__name__), hint=hint)
    raise_problems(convert_options("", train, settings)[1], "bad training")


@contextmanager
def _system_errors_translated() -> Iterator[None]:
    """Raise errors of memory and files as one readable error."""
    intact = "the last checkpoint, if any, is intact"
    try:
        yield
    except torch.OutOfMemoryError as error:
        hint = f"lower batch_size, use precision='bf16', or a smaller model; {intact}"
        raise TrainingError("out_of_memory", f"out of memory: {first_line(error)}", hint=hint) from error
    except OSError as error:
        if isinstance(error, AdvnormError):
            raise
        hint = f"free disk space, or remove what is in its place; then the same command resumes; {intact}"
        raise TrainingError("not_writable", f"cannot read or write a file: {error}", hint=hint) from error


def _log_failure(journal: Journal, _kind: Any, error: BaseException | None, _trace: Any) -> None:
    """Write the error to the log too, for readers who have not seen the terminal."""
    if error is not None:
        with suppress(OSError):
            journal.log(f"failed: {str(error) or type(error).__name__}")
