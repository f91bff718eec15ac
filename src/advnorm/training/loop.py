"""Training: an objective, an optimizer and a loader in a loop that can be killed at any point and ends the same."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from advnorm._core.errors import AdvnormError, ConfigError, first_line, raise_all
from advnorm._core.precision import float32_as, kernels
from advnorm._core.provenance import environment
from advnorm._core.records import digest, model_fingerprint, write_json
from advnorm.attacks import attacked
from advnorm.config.config import Config
from advnorm.data import FolderData, ImageData, load, make_loader, split_held_out
from advnorm.data.loader import Batch
from advnorm.norms import domains, routed_modules
from advnorm.norms.routing import Scope
from advnorm.objectives import OBJECTIVES, REGULARIZERS, SECOND_PASSES, Objective, Step
from advnorm.objectives.base import Images
from advnorm.training import checkpoint
from advnorm.training.averaging import Ema
from advnorm.training.banks import leaves_banks_unused, routing
from advnorm.training.journal import Clock, Journal
from advnorm.training.mixing import mixed
from advnorm.training.optimizer import learning_rate, make_optimizer, only_norms
from advnorm.training.ranks import Ranks, TrainingError, placed
from advnorm.training.run import Run, build_model, described, part, snapshot, start_from
from advnorm.training.step_program import (
    CapturedStep,
    Precision,
    attack_a_copy,
    capture_attack,
    compile_network,
    forwards,
    replayable,
    room_for_variants,
    runs_compiled,
)
from advnorm.training.validation import Validation

#: Ranks agree on stopping and on checkpoints in between every so many steps: each time costs a reduction.
AGREE_EVERY = 20
#: What is wanted between two steps, the greater the more urgent.
GO_ON, SAVE, STOP = 0, 1, 2


def train(
    config: Config,
    *,
    seed: int | None = None,
    out: Path | str = "runs",
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
    download: bool = False,
    workers: int | None = None,
    max_minutes: float | None = None,
    checkpoint_minutes: float = 10.0,
    progress: bool = False,
    tensorboard: bool = False,
) -> Run:
    """Train by a configuration into a folder of ``out``; the same call goes on from the last checkpoint.

    A run that was killed ends with the same bits as one that was not, on the same device and with as many processes.
    ``max_minutes`` and SIGTERM end it at a checkpoint before its time: then ``run.finished`` is False. So does Ctrl-C,
    which then raises ``KeyboardInterrupt``; a second one does not wait for the checkpoint. ``progress`` shows a bar on
    a terminal, else a line per epoch; ``workers`` decode image files, by default one per core, 4 at most. Under
    ``torchrun`` every process calls this, and ``out`` is a folder that all of them see. ``out`` gets one folder per
    configuration and seed; one that holds something else is refused, and nothing is made before all checks are passed.
    """
    began = time.monotonic()
    if not isinstance(config, Config):
        where = repr(config) if isinstance(config, str) else "..."
        raise ConfigError(
            f"train takes a Config, got {type(config).__name__}; of a file that is advnorm.load_config({where}), of a "
            f"study's cell advnorm.studies.get({where})"
        )
    problems = []
    if max_minutes is not None and not max_minutes >= 0:
        problems.append(f"max_minutes must be at least 0, or None for no limit, got {max_minutes}")
    if not checkpoint_minutes >= 0:
        problems.append(f"checkpoint_minutes must be at least 0, got {checkpoint_minutes}")
    raise_all(problems, "bad training")
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    run = Run(Path(out) / f"{config.run_name}-seed{config.seed}")
    with _told_plainly(), torch.inference_mode(False), torch.enable_grad(), ExitStack() as stack:
        ranks = stack.enter_context(placed(device))
        read = partial(load, config.data.name, "train", data_dir, download=download, **config.data.options)
        if download and ranks.world > 1:  # by the first process; the others find the files
            ranks.lead_does(read)
        data = read()
        about = described(data)
        ranks.lead_does(lambda: run.check(config, about))
        if ranks.agreed(int(run.finished)):
            return run
        journal = Journal(run.folder, active=ranks.lead, progress=progress, tensorboard=tensorboard)
        loop = Loop(run, config.scaled(), data, ranks, journal, workers=workers)
        start: dict[str, Any] = {"advnorm": environment(ranks.device)["advnorm"]}
        start |= {"weights_fingerprint": loop.weights_fingerprint} if loop.weights_fingerprint else {}
        ranks.lead_does(lambda: stack.enter_context(run.claimed(config, about, **start)))
        if ranks.agreed(int(run.finished)):  # by another process, meanwhile
            return run
        stack.push(partial(_log_failure, journal))
        loop.work(
            until=math.inf if max_minutes is None else began + 60 * max_minutes,
            checkpoint_seconds=60 * checkpoint_minutes,
        )
    if loop.stop.interrupted and not run.finished:
        raise KeyboardInterrupt
    return run


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn what the machine lacks into one readable error."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"out of memory: {str(error).splitlines()[0]}; lower batch_size, use precision='bf16', or a smaller model. "
            "The last checkpoint, if any, is intact"
        ) from error
    except OSError as error:
        if isinstance(error, AdvnormError):
            raise
        raise TrainingError(
            f"cannot read or write a file: {error}. The last checkpoint, if any, is intact; the same command goes on"
        ) from error


def _log_failure(journal: Journal, _kind: Any, error: BaseException | None, _trace: Any) -> None:
    """Leave the reason in the log too: who looks at the folder has not seen the terminal."""
    if error is not None:
        with suppress(OSError):
            journal.say(f"failed: {str(error) or type(error).__name__}")


class Loop:
    """The state of a training and what moves it: steps, epochs, checkpoints. Making it touches no file."""

    def __init__(
        self,
        run: Run,
        config: Config,
        data: ImageData | FolderData,
        ranks: Ranks,
        journal: Journal,
        *,
        workers: int | None,
    ) -> None:
        self.run, self.config, self.ranks, self.journal = run, config, ranks, journal
        device = ranks.device
        on_cuda = device.type == "cuda"
        self.precision: Precision = "float32"
        if config.precision != "auto":
            self.precision = config.precision
        elif on_cuda:
            self.precision = "bf16"
        channels_last = on_cuda if config.channels_last == "auto" else config.channels_last
        self.compiled = on_cuda if config.compile == "auto" else config.compile

        train_part, held_out = data, None
        if config.held_out:
            train_part, held_out = split_held_out(data, config.held_out, config.seed)  # pyright: ignore[reportArgumentType]
        self.loader = make_loader(
            train_part,
            batch_size=config.batch_size,
            seed=config.seed,
            augment=config.augment,
            device=device,
            rank=ranks.rank,
            world=ranks.world,
            channels_last=channels_last,
            workers=workers,
        )
        self.classes = data.num_classes
        self._seed(config.seed)
        self.model = build_model(config, described(data))
        self.weights_fingerprint: str | None = None
        if config.weights is not None and not checkpoint.exists(run.checkpoints, "last"):
            start_from(self.model, config.weights)
            self.weights_fingerprint = model_fingerprint(self.model)
        if config.train_only == "norms":
            only_norms(self.model)
        self.model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)  # pyright: ignore
        self.names: dict[Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        self.objective = build_objective(config, self.model)
        self._try_forwards(data.image_shape)
        self.validation = None
        if held_out is not None and config.validate_every:
            self.validation = Validation(
                held_out,
                config,
                ranks,
                trained=self.objective.trained_domains(),
                precision=self.precision,
                channels_last=channels_last,
                workers=workers,
            )
        self.captured: CapturedStep | None = None
        if self.compiled:
            compile_network(self.objective.bare, journal.say)
            if self.precision == "bf16":
                attack_a_copy(self.objective.bare, journal.say)
            if on_cuda and self.objective.attack is not None:
                capture_attack(self.objective.bare, journal.say)
            if on_cuda and ranks.world == 1 and replayable(self.objective):
                self.captured = CapturedStep(self.objective, self.precision, device, journal.say)
        self.wrapped: nn.Module = self.objective
        if ranks.world > 1:
            # Statistics that ranks move apart are rank 0's before each step, as a checkpoint has them.
            new = "forward_sync_buffers" in signature(nn.parallel.DistributedDataParallel).parameters  # torch 2.13
            buffers: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": not self._together}
            self.wrapped = DistributedDataParallel(
                self.objective,
                device_ids=[device.index] if on_cuda else None,
                find_unused_parameters=leaves_banks_unused(self.objective),
                **buffers,
            )
        self.optimizer = make_optimizer(
            self.model,
            optimizer=config.optimizer,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            norm_weight_decay=config.norm_weight_decay,
        )
        self.ema = None if config.ema is None else Ema(self.model, config.ema, buffers=config.ema_buffers)
        self.step = 0
        self.total = config.epochs * self.loader.steps
        self.sums: dict[str, Tensor] = {}  # of this epoch's losses and accuracies, in this process
        self.best: dict[str, Any] | None = None
        self.clock = Clock(device)
        self.pieces: list[dict[str, Any]] = []  # where and by which version the run was computed, from which step on
        self.stop = Stop()
        self.until, self.first = math.inf, 0  # when this attempt ends, and the step that it began with

    @property
    def _together(self) -> bool:
        """Whether every process has the same statistics; an attack that moves them does so by its own images."""
        return self.config.sync_statistics and self.config.attack.statistics != "batch"

    def _try_forwards(self, shape: tuple[int, ...]) -> None:
        """Refuse images and batches that the network cannot take, with forwards that leave no trace in it.

        Under :meth:`speed`: cuDNN keeps what it chooses here for the batches that come.
        """
        config, ranks, objective = self.config, self.ranks, self.objective.bare
        count = config.batch_size // ranks.world
        share = getattr(objective, "clean_share", 1)
        if ranks.world > 1 and not math.isclose(share * count, round(share * count)):
            raise ConfigError(
                f"objective.clean_share {share} of the {count} images of each process is no whole number, so that "
                f"{ranks.world} processes would not train as one; change either so that clean_share · batch_size / "
                f"{ranks.world} is whole"
            )
        layout = torch.channels_last if self.loader.channels_last else torch.contiguous_format
        x = torch.full((count, *shape), 0.5, device=ranks.device).contiguous(memory_format=layout)
        index = torch.arange(count, device=ranks.device)
        images = Images(x, index % self.classes, index, x)
        size = "×".join(map(str, shape))
        refusal = (
            f"model {config.model.name} with norm {config.norm} cannot take batches of {count} images of {size}",
            "use another model, norm, batch_size or image size",
        )
        try:
            with self.speed(), forwards(self.precision, ranks.device), torch.no_grad():
                for domain in objective.trained_domains():
                    branch = domain if domain in domains(self.model) else None
                    with attacked(self.model, route=branch) as predict:
                        predict(x)
                with attacked(self.model, statistics="batch_frozen"), ExitStack() as stack:
                    if routed_modules(self.model):  # over all processes, as in training
                        stack.enter_context(Scope(self.model, {"alone": False}))
                    objective.forwards(images)
                    if config.second_pass is not None:
                        refusal = (
                            f"second_pass {config.second_pass.name} cannot be taken with {count} images",
                            "change second_pass.samples, second_pass.groups or batch_size",
                        )
                        self.objective.forwards(images)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever a network says to a shape that nobody thought of
            raise ConfigError(f"{refusal[0]}: {first_line(error)}; {refusal[1]}") from error

    # -- work ------------------------------------------------------------------------------------------------------

    def work(self, *, until: float, checkpoint_seconds: float) -> None:
        """Train to the end, or to the next checkpoint when told to stop."""
        config, steps = self.config, self.loader.steps
        self.until = until
        environ = environment(self.ranks.device)
        self._resume()
        self.first = self.step
        self._begin_piece(environ)
        with ExitStack() as stack:
            stack.enter_context(self.stop.listening())
            stack.enter_context(self.speed())
            self.journal.open(stack, step=self.step, steps=steps, epochs=config.epochs, batch_size=config.batch_size)
            self._introduce(environ)
            saved = time.monotonic()
            judging = self.step % steps == 0 and bool(self.sums)  # an epoch whose end was not reached
            for epoch in range(self.step // steps - judging, config.epochs):
                seconds, first = self.clock.total, self.step
                self.prepare(epoch)
                self.clock.start()
                for batch in self.loader.epoch(epoch, self.step - epoch * steps):
                    self.train_step(batch)
                    wish = SAVE if time.monotonic() - saved >= checkpoint_seconds else GO_ON
                    wish = STOP if self._told_to_stop() else wish
                    wish = self._agreed(wish) if self.step % steps else GO_ON  # an epoch's end saves anyway
                    if wish != GO_ON:
                        self._check()
                        self.clock.stop()
                        self._save()
                        if wish == STOP:
                            self.journal.say(f"stopped at step {self.step} of {self.total}; the same command goes on")
                            return
                        saved = time.monotonic()
                        self.clock.start()
                ended = self._end_epoch(epoch, seconds, self.step - first)
                saved = time.monotonic()
                if not ended or (self.ranks.agreed(int(self._told_to_stop())) and self.step < self.total):
                    where = "after" if ended else "while held-out images judge"
                    self.journal.say(f"stopped {where} epoch {epoch + 1} of {config.epochs}; the same command goes on")
                    return
        self.prepare(config.epochs - 1)  # a run that goes on only to be recorded has been in none
        self.ranks.lead_does(lambda: self._finish(environ))

    def _told_to_stop(self) -> bool:
        return self.stop.told or time.monotonic() >= self.until

    def _agreed(self, wish: int) -> int:
        """The most urgent wish of all ranks; asked for rarely within an epoch."""
        if self.ranks.world > 1 and self.step % AGREE_EVERY:
            return GO_ON
        return self.ranks.agreed(wish)

    @contextmanager
    def speed(self) -> Iterator[None]:
        """Scope of all that is computed: how float32 is multiplied, and how the libraries choose their kernels."""
        with ExitStack() as stack:
            if self.precision != "bf16":
                stack.enter_context(float32_as("tf32" if self.precision == "tf32" else "ieee", self.ranks.device))
            if self.compiled:
                stack.enter_context(room_for_variants())
            if self.ranks.device.type == "cuda":
                stack.enter_context(kernels(deterministic=self.config.deterministic))
            yield

    def prepare(self, epoch: int) -> None:
        """What changes from epoch to epoch: the attack's warm-up, and running statistics at the end (paper E)."""
        config = self.config
        if self.objective.needs_attack:
            self.objective.attack = config.build_attack(epoch)
        self.objective.statistics = "running" if epoch >= config.epochs - config.running_epochs else "batch"
        self.model.train()

    def train_step(self, batch: Batch) -> None:
        config = self.config
        lr = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # What the model itself draws (dropout) depends on seed, step and rank alone, so that there is no state to keep;
        # hashed, since of a seed the CPU's generator takes 32 bits.
        self._seed(int(digest(config.seed, self.step, self.ranks.rank)[:15], 16))
        x, y = mixed(
            config.mix,
            batch.x,
            batch.y,
            classes=self.classes,
            alpha=config.mix_alpha,
            seed=config.seed,
            step=self.step,
        )
        step = self._differentiated(x, y, batch.index)
        if config.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.names, config.grad_clip)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)
        seen = self._add(step)
        self.step += 1
        self.clock.step()
        self.journal.show(self.step, seen, lr)

    def _differentiated(self, x: Tensor, y: Tensor, index: Tensor) -> Step:
        """The loss, with every parameter's gradient."""
        if self.captured is not None:
            with forwards(self.precision, self.ranks.device):
                images = self.objective.images(x, y, index)
            return self.captured(images)
        with forwards(self.precision, self.ranks.device):
            step: Step = self.wrapped(x, y, index=index)
        self.optimizer.zero_grad(set_to_none=True)
        step.loss.backward()
        return step

    def _seed(self, seed: int) -> None:
        """Seed what this training draws from; other devices' generators are not its own."""
        torch.default_generator.manual_seed(seed)
        if self.ranks.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def _learning_rate(self) -> float:
        config = self.config
        return learning_rate(
            self.step,
            schedule=config.schedule,
            lr=config.lr,
            epochs=config.epochs,
            steps_per_epoch=self.loader.steps,
            milestones=config.milestones,
            gamma=config.gamma,
            warmup_epochs=config.warmup_epochs,
            peak_share=config.peak_share,
        )

    @torch.no_grad()
    def _add(self, step: Step) -> dict[str, Tensor]:
        """Add up the step's terms and hits, on the device: a look at them every step would make it wait."""
        seen = {"loss": step.loss.detach(), **step.terms}
        for domain, logits in step.logits.items():
            labels = step.labels[domain]
            labels = labels if labels.dim() == 1 else labels.argmax(1)  # soft ones: the class of the larger share
            seen[f"{domain}_accuracy"] = (logits.argmax(1) == labels).double().mean()
        if not self.sums:
            self.sums = {name: torch.zeros((), dtype=torch.float64, device=self.ranks.device) for name in seen}
        for name, value in seen.items():
            self.sums[name] += value
        return seen

    def _end_epoch(self, epoch: int, seconds: float, steps: int) -> bool:
        """Metrics, validation and a checkpoint; False where it was told to stop before the images were judged."""
        self._check()
        self.clock.stop()
        seconds = self.clock.total - seconds
        means = self.ranks.gathered(torch.stack(list(self.sums.values()))).mean(0) / self.loader.steps
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.step, "lr": self.optimizer.param_groups[0]["lr"]}
        row |= dict(zip(self.sums, means.tolist()))
        started, every = time.perf_counter(), self.config.validate_every
        if self.validation is not None and ((epoch + 1) % every == 0 or epoch + 1 == self.config.epochs):
            row["held_out"] = self._validate(self.validation)
            if row["held_out"] is None:
                self._save()  # with the sums, by which the next attempt knows where it is
                return False
            if self.best is None or row["held_out"]["score"] > self.best["held_out"]["score"]:
                self.best = row
        self.sums = {}
        timing = {
            "epoch": epoch + 1,
            "steps": steps,
            "seconds": seconds,
            "images_per_second": steps * self.config.batch_size / seconds if steps else None,
            "validation_seconds": time.perf_counter() - started,
        }
        self.ranks.lead_does(lambda: self.journal.row(row, timing))
        self._save()
        return True

    def _validate(self, validation: Validation) -> dict[str, float] | None:
        """Of the model that a checkpoint would give: rank 0's statistics, and the average where there is one."""
        if not self._together:
            self.ranks.as_lead(list(self.model.buffers()))
            if self.ema is not None:
                self.ranks.as_lead(list(self.ema.state_dict()["average"].values()))
        with nullcontext() if self.ema is None else self.ema.swapped(self.model):
            return validation(self.model, lambda: bool(self.ranks.agreed(int(self._interrupts_judging()))))

    def _interrupts_judging(self) -> bool:
        """A limit of time lets an attempt get further than where it began, be it by a judged epoch alone."""
        return self.stop.told or (self.step > self.first and self._told_to_stop())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that a resumed run needs, as tensors and as data for JSON."""
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        state, optimizer = checkpoint.flatten_optimizer(self.optimizer, self.names)
        tensors |= state
        meta: dict[str, Any] = {"step": self.step, "optimizer": optimizer, "best": self.best}
        if self.ema is not None:
            ema = self.ema.state_dict()
            tensors |= {f"ema.{name}": value for name, value in ema["average"].items()}
            meta["ema_updates"] = ema["updates"]
        if self.sums:
            tensors["sums"] = self.ranks.gathered(torch.stack(list(self.sums.values())))
        meta |= {"sums": list(self.sums), "metrics": self.journal.rows, "pieces": self.pieces}
        return tensors, meta | {"clock": {name: getattr(self.clock, name) for name in Clock.KEPT}}

    def _check(self) -> None:
        """Raise where the loss or the state is no longer finite, so that no checkpoint ever holds such. Waits."""
        tensors, _ = self._state()
        floats = [value for value in tensors.values() if value.is_floating_point()]
        finite = torch.stack([value.isfinite().all().to(self.ranks.device) for value in floats]).all()
        if self.ranks.agreed(int(not finite)):
            raise TrainingError(
                f"the loss or a parameter is not finite any more, found at step {self.step} of {self.total}; lower lr, "
                "set grad_clip, or use precision='float32'. The last checkpoint, if any, is from before it"
            )

    def _save(self) -> None:
        tensors, meta = self._state()
        self.ranks.lead_does(lambda: self._write(tensors, meta))

    def _write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        checkpoint.save(self.run.checkpoints, "last", tensors, meta)
        self._name_it(tensors)

    def _name_it(self, tensors: Mapping[str, Tensor]) -> None:
        """What the checkpoint just written is besides: the best, one to keep. Once more after a kill in between."""
        if self.best is not None and self.best["step"] == self.step:
            checkpoint.alias(self.run.checkpoints, "last", "best")
        epoch, rest = divmod(self.step, self.loader.steps)
        if epoch in self.config.snapshots and not rest:
            model = {name: value for name, value in tensors.items() if name.startswith(("model.", "ema."))}
            checkpoint.save(self.run.checkpoints, snapshot(epoch), model, {"step": self.step})

    def _resume(self) -> None:
        """Take up the last checkpoint, where there is one; what was written after it is taken back."""
        if checkpoint.exists(self.run.checkpoints, "last"):
            try:
                tensors, meta = checkpoint.load(self.run.checkpoints, "last")
                if "pieces" not in meta:
                    raise ConfigError(
                        f"the checkpoint in {self.run.folder} is of an older version of advnorm; use that"
                    )
            except ConfigError as error:
                raise ConfigError(f"{error}. Deleting {self.run.folder} starts the run anew") from error
            checkpoint.restore_model(self.model, part(tensors, "model."), f"the checkpoint of {self.run.folder}")
            checkpoint.restore_optimizer(self.optimizer, self.names, tensors, meta["optimizer"])
            if self.ema is not None:
                self.ema.load_state_dict({"average": part(tensors, "ema."), "updates": meta["ema_updates"]})
            if meta["sums"]:
                rows = tensors["sums"].to(self.ranks.device)
                # Other processes than before share what was summed up equally.
                row = rows[self.ranks.rank] if len(rows) == self.ranks.world else rows.mean(0)
                self.sums = dict(zip(meta["sums"], row.clone()))
            self.step, self.best, self.pieces = meta["step"], meta["best"], meta["pieces"]
            for name, value in meta["clock"].items():
                setattr(self.clock, name, value)
            self.ranks.lead_does(lambda: (self.journal.restore(meta["metrics"]), self._name_it(tensors)))
            self.ranks.lead_does(lambda: checkpoint.sweep(self.run.checkpoints))  # a kill may come before the last one
        else:
            self.ranks.lead_does(lambda: self.journal.restore(()))
        if self.ranks.agreed(self.step) != self.step:
            raise TrainingError(f"not every process sees {self.run.folder}; choose an out that all of them share")

    def _begin_piece(self, environ: Mapping[str, Any]) -> None:
        """Note where the run is computed from here on, unless it is as before."""
        here = {**environ, "processes": self.ranks.world}
        if not self.pieces or {**self.pieces[-1], "from_step": 0} != {**here, "from_step": 0}:
            self.pieces = [*self.pieces, {"from_step": self.step, **here}]

    # -- what is told ----------------------------------------------------------------------------------------------

    def _introduce(self, environ: Mapping[str, Any]) -> None:
        say = self.journal.say
        version = f"advnorm {environ['advnorm']} ({environ['commit'] or 'no commit'}), torch {environ['torch']}"
        say(f"{version} on {environ['device']} × {self.ranks.world}, {self.precision}, seed {self.config.seed}")
        if self.step:
            say(f"going on from step {self.step} of {self.total}")
            return
        say(f"{self.total} steps of {self.config.batch_size} images; objective {' around '.join(self.objective.kinds)}")
        for kind in routing(self.objective):
            for domain, banks in kind["domains"].items():
                told = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in banks.items() if value)
                say(f"{kind['norm']} in {kind['layers']} layers: {domain} images: {told or 'none in training'}")

    def _finish(self, environ: Mapping[str, Any]) -> None:
        config, device, rate = self.config, self.ranks.device, self.clock.steps_per_second()
        record = {
            **self.run.description,
            "last": self.run.metrics()[-1],
            "best": self.best,
            "objective": self.objective.recipe,
            "attack": None if self.objective.attack is None else repr(self.objective.attack),
            "validation_attack": None if self.validation is None else repr(self.validation.attack),
            "layout": getattr(self.objective.bare, "layout", None),
            "trained_domains": list(self.objective.trained_domains()),
            "routing": routing(self.objective),
            "steps": self.total,
            "running_statistics_epochs": config.running_epochs,
            "seconds": self.clock.total,
            "first_step_seconds": self.clock.first_step,
            "images_per_second": None if rate is None else rate * config.batch_size,
            "precision": self.precision,
            "compiled": runs_compiled(self.objective.bare),
            "processes": self.ranks.world,
            # Reserved: the memory of CUDA graphs is neither free nor counted as allocated.
            "peak_memory": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            **environ,
            "pieces": self.pieces,
        }
        write_json(self.run.folder / "record.json", record)
        self.journal.say(f"finished after {self.clock.total:.0f} s of training: {self.run.folder}")


class Stop:
    """Whether the run was told to stop: by SIGTERM or by a first Ctrl-C; a second one ends it at once."""

    def __init__(self) -> None:
        self.told = self.interrupted = False

    def _terminate(self, *_: object) -> None:
        self.told = True

    def _interrupt(self, *_: object) -> None:
        if self.interrupted:
            raise KeyboardInterrupt
        self.told = self.interrupted = True
        with suppress(OSError):  # not print, which may be in the middle of its work
            os.write(2, b"\nstopping at a checkpoint; Ctrl-C again stops at once\n")

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Scope: signals are heard; only a program's main thread can, and one that handles Ctrl-C itself goes on so."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[int, Any] = {signal.SIGTERM: self._terminate}
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handlers[signal.SIGINT] = self._interrupt
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)


def build_objective(config: Config, model: nn.Module) -> Objective:
    """The objective of a configuration on a model."""
    kind = OBJECTIVES.get(config.objective.name)
    attack = config.build_attack() if kind.needs_attack else None
    objective: Objective = kind(model, attack, label_smoothing=config.label_smoothing, **config.objective.options)
    objective.seed = config.seed
    if config.regularizer is not None:
        objective = REGULARIZERS.get(config.regularizer.name)(objective, **config.regularizer.options)
    if config.second_pass is not None:
        objective = SECOND_PASSES.get(config.second_pass.name)(objective, **config.second_pass.options)
    return objective
