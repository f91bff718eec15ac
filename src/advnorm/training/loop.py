"""The training loop: an objective, an optimizer and a loader. A killed run resumes from its last checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from advnorm._core.devices import identify_device
from advnorm._core.errors import ConfigError, raise_problems
from advnorm._core.provenance import environment
from advnorm._core.records import digest, model_fingerprint, write_json
from advnorm._core.seeding import seed_generators
from advnorm._core.shapes import check_record, with_digest
from advnorm._core.tensors import meta_problems
from advnorm.config import Config
from advnorm.data import FolderData, ImageData, split_held_out
from advnorm.data.loader import Batch
from advnorm.objectives import ObjectiveOutput
from advnorm.objectives.second_pass import SecondPass
from advnorm.training import checkpoint
from advnorm.training.averaging import EMA
from advnorm.training.bank_usage import routing
from advnorm.training.build import (
    build_loader,
    build_model,
    build_objective,
    data_properties,
    describe_images,
    resolve_auto,
)
from advnorm.training.compilation import Log
from advnorm.training.forward_check import check_forwards
from advnorm.training.journal import Journal, format_seconds
from advnorm.training.mixing import mix_batch
from advnorm.training.monitor import Monitor
from advnorm.training.optimizer import make_optimizer, only_norms
from advnorm.training.ranks import Ranks, TrainingError
from advnorm.training.recomputation import recompute_blocks
from advnorm.training.run_folder import Run, load_initial_weights, snapshot
from advnorm.training.schedule import learning_rate
from advnorm.training.sharding import full_tensor, gathered, shard_model
from advnorm.training.state import CheckpointMeta, TrainingState
from advnorm.training.step_program import make_step_program
from advnorm.training.stop_signals import StopSignals
from advnorm.training.validation import Validation

#: Steps between two agreements of the ranks on stopping and on checkpoints: each one costs a reduction.
AGREE_EVERY = 20
#: Seconds for which a checkpoint is new enough: writing one takes as long as a part of a short epoch.
NEW_ENOUGH = 30.0


class Action(IntEnum):
    """What happens between two steps; ranks agree on the largest."""

    CONTINUE = 0
    SAVE = 1
    STOP = 2


class TrainingLoop:
    """Steps, epochs and checkpoints of a training. Its construction writes no file.

    ``on_fallback`` gets a message for each fast path that cannot be used; by default the journal's log.
    """

    def __init__(
        self,
        training_run: Run,
        config: Config,
        data: ImageData | FolderData,
        ranks: Ranks,
        journal: Journal,
        *,
        workers: int | None,
        on_fallback: Log | None = None,
    ) -> None:
        self.training_run, self.ranks, self.journal = training_run, ranks, journal
        self.config = config = resolve_auto(config, ranks.device)
        train_part, held_out = data, None
        if config.held_out:
            train_part, held_out = split_held_out(data, config.held_out, config.seed)  # pyright: ignore[reportArgumentType]
        batches: dict[str, Any] = {"batch_size": config.batch_size, "augment": config.augment, "seed": config.seed}
        self.loader = build_loader(train_part, config, ranks, workers, **batches)
        self._data_words = f"{train_part.name}: {describe_images(train_part)}"
        self._data_words += "" if held_out is None else f"; {len(held_out):,} held out"
        self.total = config.epochs * self.loader.steps
        self._weights_notes: tuple[str, ...] = ()
        self.model, self.weights_fingerprint = self._initial_model(data)
        self.objective = build_objective(config, self.model)
        self.program = make_step_program(
            self.objective,
            ranks,
            on_fallback or journal.log,
            compiled=config.compile is True,
            precision=config.precision,
            deterministic=config.deterministic,
            sync_buffers=not self._same_statistics,
            accumulate=config.accumulate,
            sharded=self._is_sharded,
        )
        with gathered(self.model):
            check_forwards(self.program, config, ranks, data)
        self.validation = self.monitor = None
        if held_out is not None and config.validate_every:
            tested = self.objective.tested_domains()
            validation = partial(Validation, held_out, ranks=ranks, tested=tested, workers=workers)
            self.validation = validation(config)
            self.monitor = Monitor(config, partial(validation, with_clean=False)) if config.monitor else None
        self.ema = None if config.ema is None else EMA(self.model, config.ema, buffers=config.ema_buffers)
        self.optimizer = make_optimizer(self.model, config)
        self.state = TrainingState(self.model, self.optimizer, self.ema, ranks)
        self.signals = StopSignals()
        # For this attempt: the time to stop, seconds between checkpoints, the time of the last checkpoint, first step.
        self._until = self._checkpoint_seconds = math.inf
        self._saved, self._first_step = time.monotonic(), 0

    def _initial_model(self, data: ImageData | FolderData) -> tuple[nn.Module, str | None]:
        """The model of the first step, on the device, and the fingerprint of the given initial weights, if any."""
        config = self.config
        seed_generators(config.seed, self.ranks.device)
        model = build_model(config, data_properties(data))
        raise_problems(meta_problems(model))
        fingerprint = None
        if config.weights is not None and not checkpoint.exists(self.training_run.checkpoints, "last"):
            self._weights_notes = load_initial_weights(model, config.weights)
            fingerprint = model_fingerprint(model)
        if config.train_only == "norms":
            only_norms(model)
        if config.recompute:
            recompute_blocks(model)
        memory_format = torch.channels_last if config.channels_last is True else torch.preserve_format
        model = model.to(self.ranks.device, memory_format=memory_format)  # pyright: ignore
        if self._is_sharded:
            shard_model(model, self.ranks)
        return model, fingerprint

    @property
    def _is_sharded(self) -> bool:
        return self.config.parallel == "fsdp" and self.ranks.world > 1

    @property
    def _same_statistics(self) -> bool:
        """Whether every process has the same statistics; an attack on batch statistics moves each by its own images."""
        return self.config.sync_statistics and self.config.attack.statistics != "batch"

    # -- epochs and steps ------------------------------------------------------------------------------------------

    def run(self, *, until: float, checkpoint_seconds: float) -> None:
        """Train to the end, or stop at a checkpoint after a signal or the time ``until``."""
        config, steps, state = self.config, self.loader.steps, self.state
        environ = environment(self.ranks.device)
        self._resume()
        state.begin_piece(environ)
        self._until, self._checkpoint_seconds = until, checkpoint_seconds
        self._saved, self._first_step = time.monotonic(), state.step
        with ExitStack() as stack:
            stack.enter_context(self.signals.listening())
            stack.enter_context(self.program.scope())
            self.journal.open(stack, step=state.step, steps=steps, epochs=config.epochs, batch_size=config.batch_size)
            self._log_start(environ)
            validating = state.step % steps == 0 and bool(state.sums)  # stopped during an epoch's validation
            for epoch in range(state.step // steps - validating, config.epochs):
                stopped = self._run_epoch(epoch)
                if stopped:
                    self.journal.log(f"stopped {stopped}; run the same command to resume")
                    return
        self.prepare(config.epochs - 1)  # a run that resumes only to write its record has prepared no epoch
        self.ranks.run_on_lead(lambda: self._write_record(environ))

    def _run_epoch(self, epoch: int) -> str | None:
        """Train the rest of an epoch, validate and save. Return where the training was stopped, if it was."""
        state, steps, number = self.state, self.loader.steps, f"epoch {epoch + 1} of {self.config.epochs}"
        seconds, first_step = state.clock.total, state.step
        self.prepare(epoch)
        state.clock.start()
        for batch in self.loader.epoch(epoch, state.step - epoch * steps):
            self.train_step(batch)
            action = self._next_action()
            if action != Action.CONTINUE:
                self._check_finite()
                state.clock.stop()
                self._save()
                if action == Action.STOP:
                    return f"at step {state.step} of {self.total}"
                state.clock.start()
        self._check_finite()
        state.clock.stop()
        if not self._end_epoch(epoch, state.clock.total - seconds, state.step - first_step):
            return f"in the validation of {number}"
        stops = self.ranks.any(self._should_stop())
        if stops or self._ends_with_checkpoint():
            self._save()
        return f"after {number}" if stops and state.step < self.total else None

    def _ends_with_checkpoint(self) -> bool:
        """Whether the epoch that has ended is kept, or the last checkpoint is not new enough."""
        state = self.state
        last, best = state.step == self.total, state.best is not None and state.best["step"] == state.step
        kept = last or best or state.step // self.loader.steps in self.config.snapshots
        old = time.monotonic() - self._saved >= min(self._checkpoint_seconds, NEW_ENOUGH)
        return self.ranks.any(kept or old)

    def _should_stop(self) -> bool:
        return self.signals.received or time.monotonic() >= self._until

    def _next_action(self) -> Action:
        """The most urgent action of all ranks, which they exchange every few steps."""
        if self.ranks.world > 1 and self.state.step % AGREE_EVERY:
            return Action.CONTINUE
        if self.state.step % self.loader.steps == 0:  # the end of an epoch saves anyway
            return Action.CONTINUE
        due = time.monotonic() - self._saved >= self._checkpoint_seconds
        own = Action.STOP if self._should_stop() else Action.SAVE if due else Action.CONTINUE
        return Action(self.ranks.maximum(own))

    def prepare(self, epoch: int) -> None:
        """Set what changes between epochs: warm-ups, and running statistics at the end (paper E)."""
        config = self.config
        if self.objective.needs_attack:
            self.objective.attack = config.build_attack(epoch)
        self.objective.statistics = "running" if epoch >= config.epochs - config.running_epochs else "batch"
        if isinstance(self.objective, SecondPass):
            self.objective.active = epoch >= config.second_pass_warmup_epochs
        self.model.train()

    def train_step(self, batch: Batch) -> None:
        config, state = self.config, self.state
        lr = learning_rate(config, state.step, self.loader.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # The model's own random numbers (dropout) depend on seed, step and rank alone, so that no state has to be kept;
        # hashed, because the CPU's generator takes 32 bits of a seed.
        seed_generators(int(digest(config.seed, state.step, self.ranks.rank)[:15], 16), self.ranks.device)
        x, y = mix_batch(config, batch.x, batch.y, classes=self.loader.data.num_classes, step=state.step)
        output = self.program(x, y, batch.index)
        if config.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(state.names, config.grad_clip)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)
        values = step_metrics(output)
        state.add(values)
        state.step += 1
        state.clock.step()
        if state.clock.estimates and (rate := state.clock.steps_per_second()):
            epoch = self.loader.steps / rate
            self.journal.log(f"about {format_seconds(epoch)} per epoch, {format_seconds(epoch * config.epochs)} in all")
        self.journal.show(state.step, values, lr)

    def _end_epoch(self, epoch: int, seconds: float, steps: int) -> bool:
        """Validate and write metrics; False if validation was stopped, after a checkpoint."""
        state, config = self.state, self.config
        means = self.ranks.gathered(torch.stack(list(state.sums.values()))).mean(0) / self.loader.steps
        row: dict[str, Any] = {"epoch": epoch + 1, "step": state.step, "lr": self.optimizer.param_groups[0]["lr"]}
        row |= dict(zip(state.sums, means.tolist()))
        started = time.perf_counter()
        warning = None
        if self.validation is not None and ((epoch + 1) % config.validate_every == 0 or epoch + 1 == config.epochs):
            found = self._validate(self.validation)
            monitored = None if self.monitor is None or found is None else self._validate(self.monitor)
            if found is None or (self.monitor is not None and monitored is None):
                self._save()  # with the sums: the next attempt then repeats the validation of this epoch
                return False
            row["held_out"] = found
            if self.monitor is not None and monitored is not None:
                row["monitor"], warning = monitored, self.monitor.warning(monitored)
            if state.best is None or row["held_out"]["score"] > state.best["held_out"]["score"]:
                state.best = row
        state.sums = {}
        timing = {
            "epoch": epoch + 1,
            "steps": steps,
            "seconds": seconds,
            "images_per_second": steps * config.batch_size / seconds if steps else None,
            "validation_seconds": time.perf_counter() - started,
        }
        self.ranks.run_on_lead(lambda: self.journal.row(row, timing))
        if warning is not None:
            self.ranks.run_on_lead(lambda: self.journal.log(f"warning: {warning}"))
        return True

    def _validate(self, validation: Validation | Monitor) -> dict[str, float] | None:
        """Validate the model that a checkpoint would give: rank 0's statistics, and the average if there is one."""
        if not self._same_statistics:
            self.ranks.broadcast_from_lead(list(self.model.buffers()))
            if self.ema is not None:
                self.ranks.broadcast_from_lead([v for v in self.ema.average.values() if full_tensor(v) is v])
        with nullcontext() if self.ema is None else self.ema.swapped(self.model), gathered(self.model):
            return validation(self.model, self._stops_validation)

    def _stops_validation(self) -> bool:
        """Show progress; return whether a process interrupts the validation."""
        self.journal.show_validation(self.state.step)
        return self.ranks.any(self._interrupts_validation())

    def _interrupts_validation(self) -> bool:
        """A time limit interrupts validation only after at least one step."""
        return self.signals.received or (self.state.step > self._first_step and self._should_stop())

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def _check_finite(self) -> None:
        """Raise if the loss or the state is not finite, so that no checkpoint holds such values."""
        if self.ranks.any(not self.state.is_finite()):
            raise TrainingError(
                "not_finite",
                f"the loss or a parameter is not finite at step {self.state.step} of {self.total}",
                hint="lower lr, set grad_clip, or use precision='float32'; the last checkpoint, if any, is finite",
            )

    def _save(self) -> None:
        tensors, meta = self.state.collect()
        self.ranks.run_on_lead(lambda: self._write(tensors, {**meta, "metrics": self.journal.mark()}))
        self._saved = time.monotonic()

    def _write(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        checkpoint.save(self.training_run.checkpoints, "last", tensors, meta)
        self._keep_best_and_snapshot(tensors)

    def _keep_best_and_snapshot(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the checkpoint just written as the best one or as a snapshot; repeated after a kill in between."""
        folder, state = self.training_run.checkpoints, self.state
        if state.best is not None and state.best["step"] == state.step:
            checkpoint.alias(folder, "last", "best")
        epoch, rest = divmod(state.step, self.loader.steps)
        if epoch in self.config.snapshots and not rest:
            model = {name: value for name, value in tensors.items() if name.startswith(("model.", "ema."))}
            checkpoint.save(folder, snapshot(epoch), model, {"step": state.step})

    def _resume(self) -> None:
        """Continue from the last checkpoint if there is one; discard what was written after it."""
        folder, checkpoints, state = self.training_run.folder, self.training_run.checkpoints, self.state
        if checkpoint.exists(checkpoints, "last"):
            hint = f"delete {folder} to start the run from the beginning"
            try:
                tensors, meta = checkpoint.load(checkpoints, "last")
                check_record(meta, CheckpointMeta, checkpoints / "last.json", hint)
            except ConfigError as error:
                raise ConfigError.listing([replace(problem, hint=hint) for problem in error.problems]) from error
            state.restore(tensors, meta, f"the checkpoint of {folder}")
            self.ranks.run_on_lead(
                lambda: (self.journal.restore(meta["metrics"]), self._keep_best_and_snapshot(tensors))
            )
            self.ranks.run_on_lead(
                lambda: checkpoint.sweep(checkpoints)
            )  # a kill may have come before the last cleanup
        else:
            self.ranks.run_on_lead(lambda: self.journal.restore(None))
        if self.ranks.maximum(state.step) != state.step:
            raise TrainingError("missing_file", f"not every process sees {folder}", hint="choose an out that all share")

    # -- log and record --------------------------------------------------------------------------------------------

    def _log_start(self, environ: Mapping[str, Any]) -> None:
        log, config = self.journal.log, self.config
        version = f"advnorm {environ['advnorm']} ({environ['commit'] or 'no commit'}), torch {environ['torch']}"
        log(f"{version} on {environ['device']} × {self.ranks.world}, {self.config.precision}, seed {config.seed}")
        if self.state.step:
            log(f"resuming from step {self.state.step} of {self.total}")
            if len({piece.get("threads") for piece in self.state.pieces}) > 1 and self.ranks.device.type == "cpu":
                log(f"now {environ['threads']} CPU threads, before another number: the last bits may differ")
            return
        log(self._data_words)
        log(f"{self.total} steps of {config.batch_size} images; objective {self.objective.describe_choices()}")
        for note in self._weights_notes:
            log(f"{config.weights}: {note}")
        verbs = {"normalized_by": "normalized by", "feed": "update", "scaled_by": "scaled by"}
        for kind in routing(self.objective):
            for domain, banks in kind["domains"].items():
                text = ", ".join(f"{verbs[key]} {value}" for key, value in banks.items() if value)
                log(f"{kind['norm']} in {kind['layers']} layers: {domain} images: {text or 'none in training'}")

    def _write_record(self, environ: Mapping[str, Any]) -> None:
        config, device, state = self.config, self.ranks.device, self.state
        rate = state.clock.steps_per_second()
        record = {
            **self.training_run.description,
            "last": self.training_run.metrics()[-1],
            "best": state.best,
            "objective": self.objective.describe(),
            "attack": None if self.objective.attack is None else repr(self.objective.attack),
            "validation_attack": None if self.validation is None else repr(self.validation.attack),
            "layout": getattr(self.objective.innermost, "layout", None),
            "trained_domains": list(self.objective.trained_domains()),
            "routing": routing(self.objective),
            "steps": self.total,
            "running_statistics_epochs": config.running_epochs,
            "seconds": state.clock.total,
            "first_step_seconds": state.clock.first_step,
            "first_step_ended": state.clock.first_step_ended,
            "images_per_second": None if rate is None else rate * config.batch_size,
            "precision": self.config.precision,
            "compiled": self.program.runs_compiled,
            "processes": self.ranks.world,
            "device_id": identify_device(device),
            # Reserved: the memory of CUDA graphs is neither free nor counted as allocated.
            "peak_memory": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            **environ,
            "pieces": state.pieces,
        }
        write_json(self.training_run.folder / "record.json", with_digest(record))
        self.journal.log(f"finished after {state.clock.total:.0f} s of training: {self.training_run.folder}")


@torch.no_grad()
def step_metrics(output: ObjectiveOutput) -> dict[str, Tensor]:
    """Loss, terms and accuracies of a step, left on the device: reading them every step would wait for it."""
    values = {"loss": output.loss.detach(), **output.terms}
    for domain, logits in output.logits.items():
        labels = output.labels[domain]
        labels = labels if labels.dim() == 1 else labels.argmax(1)  # soft labels: the class with the larger share
        values[f"{domain}_accuracy"] = (logits.argmax(1) == labels).double().mean()
    return values
