"""Training: an objective, an optimizer and a loader in a loop that can be killed at any point and ends the same."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import advnorm.attacks as attack_names
from advnorm._core.distributed import rank, world_size
from advnorm._core.errors import AdvnormError, ConfigError
from advnorm._core.precision import float32_as
from advnorm._core.records import write_json
from advnorm.attacks import attacked
from advnorm.data import FolderData, ImageData, load, make_loader, split_held_out
from advnorm.data.loader import Batch
from advnorm.engine import checkpoint
from advnorm.engine.accelerate import capture_attack, compile_network
from advnorm.engine.config import Config
from advnorm.engine.ema import Ema
from advnorm.engine.optim import learning_rate, make_optimizer, only_norms
from advnorm.engine.partial import environment
from advnorm.engine.run import FORMAT, Run, build_model, described
from advnorm.norms import domains, routed_modules
from advnorm.objectives import OBJECTIVES, Objective, Step
from advnorm.threat import ThreatModel

#: Exit status of a run that was told to stop before its end: try again later (EX_TEMPFAIL of sysexits.h).
PREEMPTED = 75
#: Ranks agree on stopping and on checkpoints in between every so many steps: each time costs a reduction.
AGREE_EVERY = 20
#: Images at a time in validation.
VALIDATION_BATCH = {"cpu": 250, "cuda": 1000}


class TrainingError(AdvnormError, RuntimeError):
    """A training that cannot go on; the last checkpoint is intact."""


def train(
    config: Config,
    *,
    seed: int | None = None,
    out: Path | str = "runs",
    data_dir: Path | str | None = None,
    device: str | torch.device | None = None,
    download: bool = False,
    workers: int = 4,
    max_minutes: float | None = None,
    checkpoint_minutes: float = 10.0,
    progress: bool = False,
    tensorboard: bool = False,
) -> Run:
    """Train by a configuration into a folder of ``out``; the same call goes on from the last checkpoint.

    A run that was killed ends with the same bits as one that was not, on the same device. ``max_minutes`` and SIGTERM
    end it at a checkpoint before its time: then ``run.finished`` is False. Under ``torchrun`` every process calls this.
    ``out`` gets one folder per configuration and seed; one that holds another configuration is refused.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"train takes a Config, got {type(config).__name__}; see load_config")
    if seed is not None:
        config = dataclasses.replace(config, seed=seed)
    with ExitStack() as stack:
        place = stack.enter_context(_placed(device))
        stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        data = load(config.data.name, "train", data_dir, download=download, **config.data.options)
        run = Run(Path(out) / f"{config.run_name}-seed{config.seed}")
        loop = Loop(run, config, data, place, workers=workers, progress=progress, tensorboard=tensorboard)
        if run.finished:
            loop.say(f"{run.folder} is finished")
            return run
        stack.enter_context(loop)
        loop.work(max_minutes=max_minutes, checkpoint_minutes=checkpoint_minutes)
    return run


@contextmanager
def _placed(device: str | torch.device | None) -> Iterator[torch.device]:
    """The device to train on; under torchrun this process's own, inside a process group."""
    wanted = None if device is None else torch.device(device)
    kind = wanted.type if wanted is not None else "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError("no CUDA device here; leave device out or use device='cpu'")
    place = wanted or torch.device(kind)
    started = False
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if kind == "cuda":
            place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if not dist.is_initialized():
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
            started = True
    if place.type == "cuda":
        place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
        torch.cuda.set_device(place)
    try:
        yield place
    finally:
        if started:
            dist.destroy_process_group()


class Loop:
    """The state of a training and what moves it: steps, epochs, validation, checkpoints."""

    def __init__(
        self,
        run: Run,
        config: Config,
        data: ImageData | FolderData,
        device: torch.device,
        *,
        workers: int,
        progress: bool,
        tensorboard: bool,
    ) -> None:
        self.run, self.config, self.device = run, config, device
        self.rank, self.world = rank(), world_size()
        self.lead = self.rank == 0
        self._progress = progress and self.lead
        self._bar: Any = None
        self._held: dict[str, Any] = {}
        self._claim(data)
        on_cuda = device.type == "cuda"
        self.precision = config.precision if config.precision != "auto" else "bf16" if on_cuda else "float32"
        channels_last = on_cuda if config.channels_last == "auto" else config.channels_last
        compiled = on_cuda if config.compile == "auto" else config.compile

        train_part, self.held_out = data, None
        if config.held_out:
            train_part, self.held_out = split_held_out(data, config.held_out, config.seed)
        self.loader = make_loader(
            train_part,
            batch_size=config.batch_size,
            seed=config.seed,
            augment=config.augment,
            device=device,
            rank=self.rank,
            world=self.world,
            channels_last=channels_last,
            workers=workers,
        )
        torch.manual_seed(config.seed)
        self.model = build_model(config, described(data))
        if config.weights is not None:
            start_from(self.model, config.weights)
        if config.train_only == "norms":
            only_norms(self.model)
        self.model.to(device, memory_format=torch.channels_last if channels_last else torch.preserve_format)  # pyright: ignore
        self.names = {parameter: name for name, parameter in self.model.named_parameters()}
        self.objective = build_objective(config, self.model)
        if compiled:
            compile_network(self.objective, self.say)
        if on_cuda and compiled and self.objective.attack is not None:
            capture_attack(self.objective, self.say)
        self.wrapped: nn.Module = self.objective
        if self.world > 1:
            self.wrapped = DistributedDataParallel(
                self.objective,
                device_ids=[device.index] if on_cuda else None,
                # Statistics that are not synchronized are rank 0's before each step, as a checkpoint has them.
                broadcast_buffers=not config.sync_statistics,
                find_unused_parameters=_leaves_banks_unused(self.objective),
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
        self.sums: dict[str, Tensor] = {}
        self.best: dict[str, Any] | None = None
        self._seconds = 0.0  # of training, over all attempts
        self._first_step = 0.0
        self._stop = threading.Event()
        self._board = _board(run.folder) if tensorboard and self.lead else None

    # -- the folder ----------------------------------------------------------------------------------------------

    def _claim(self, data: ImageData | FolderData) -> None:
        """Make the folder this run's, or make sure that it is."""
        description = {"format": FORMAT, "config": self.config.to_dict(), "data": described(data)}
        path = self.run.folder / "run.json"
        if path.exists():
            found = self.run.description
            differ = [
                key
                for part in ("config", "data")
                for key in {**found[part], **description[part]}
                if key != "name" and found[part].get(key) != description[part].get(key)
            ]
            if differ:
                raise ConfigError(
                    f"{self.run.folder} holds another run: {', '.join(sorted(differ))} differ; choose another out or "
                    "name, or delete it"
                )
        elif self.lead:
            self.run.folder.mkdir(parents=True, exist_ok=True)
            (self.run.folder / "config.yaml").write_text(self.config.to_yaml(), encoding="utf-8")
            write_json(path, description)
        self._together()

    def _together(self) -> None:
        if self.world > 1:
            dist.barrier()

    def say(self, message: str) -> None:
        """A line for the log, and for the terminal where someone looks."""
        if not self.lead:
            return
        with (self.run.folder / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {message}\n")
        if self._bar is not None:
            self._bar.console.print(message, highlight=False, markup=False)

    # -- work ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Loop:
        self._stack = ExitStack()
        self._stack.enter_context(self._listening())
        if self._progress:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[terms]}"),
            )
            self._bar = self._stack.enter_context(Progress(*columns))
            self._task = self._bar.add_task("training", total=self.config.epochs * self.loader.steps, terms="")
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.__exit__(None, None, None)
        self._bar = None
        if self._board is not None:
            self._board.close()

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """SIGTERM asks for a checkpoint and an end; only a program's main thread can listen."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, lambda *_: self._stop.set())
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def work(self, *, max_minutes: float | None, checkpoint_minutes: float) -> None:
        """Train to the end, or to the next checkpoint when told to stop."""
        self._resume()
        begun = saved = time.monotonic()
        end = math.inf if max_minutes is None else begun + 60 * max_minutes
        try:
            for epoch in range(self.step // self.loader.steps, self.config.epochs):
                started = time.perf_counter()
                first = self.step
                self._prepare(epoch)
                for batch in self.loader.epoch(epoch, self.step % self.loader.steps):
                    self._train_step(batch)
                    now = time.monotonic()
                    last_of_epoch = self.step % self.loader.steps == 0
                    wanted = 2 if self._stop.is_set() or now > end else now - saved > 60 * checkpoint_minutes
                    if not last_of_epoch and (wanted := self._agreed(int(wanted))):
                        self._save()
                        saved = now
                        if wanted == 2:
                            self.say(f"stopped at step {self.step}, checkpoint written; the same command goes on")
                            return
                self._end_epoch(epoch, time.perf_counter() - started, self.step - first)
                saved = time.monotonic()
                if self._agreed(int(self._stop.is_set() or saved > end), now=True) and epoch + 1 < self.config.epochs:
                    self.say(f"stopped after epoch {epoch + 1}, checkpoint written; the same command goes on")
                    return
        except torch.OutOfMemoryError as error:
            raise TrainingError(
                f"out of memory at step {self.step}: {str(error).splitlines()[0]}; lower batch_size, use "
                "precision='bf16', or a smaller model. The last checkpoint is intact"
            ) from error
        self._finish()

    def _agreed(self, wanted: int, *, now: bool = False) -> int:
        """The greatest wish of all ranks; asked for rarely in the middle of an epoch."""
        if self.world == 1:
            return wanted
        if not now and self.step % AGREE_EVERY:
            return 0
        flag = torch.tensor(wanted, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return int(flag)

    def _prepare(self, epoch: int) -> None:
        """What changes from epoch to epoch: the attack's warm-up, and running statistics at the end (paper E)."""
        config = self.config
        if self.objective.needs_attack:
            self.objective.attack = config.build_attack(epoch)
        self.objective.statistics = "running" if epoch >= config.epochs - config.running_epochs else "batch"
        self.model.train()

    def _train_step(self, batch: Batch) -> None:
        config = self.config
        started = time.perf_counter() if self.step == self._resumed_at else 0.0
        lr = self._learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # What the model itself draws (dropout) depends on the step alone, so that there is no state to keep.
        torch.manual_seed((config.seed << 32) + self.step * self.world + self.rank)
        with self._computing():
            step: Step = self.wrapped(batch.x, batch.y, index=batch.index)
        self.optimizer.zero_grad(set_to_none=True)
        step.loss.backward()
        if config.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(self.names, config.grad_clip)
        self.optimizer.step()
        if self.ema is not None:
            self.ema.update(self.model)
        self._add(step)
        self.step += 1
        if started:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            self._first_step = time.perf_counter() - started
        self._show(lr)

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

    def _computing(self) -> AbstractContextManager[Any]:
        if self.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return float32_as("tf32" if self.precision == "tf32" else "ieee", self.device)

    # -- what is measured ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def _add(self, step: Step) -> None:
        """Add up the step's terms and hits, on the device: a look at them every step would make it wait."""
        seen = {"loss": step.loss.detach(), **step.terms}
        for domain, logits in step.logits.items():
            seen[f"{domain}_accuracy"] = (logits.argmax(1) == step.labels[domain]).double().mean()
        if not self.sums:
            self.sums = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in seen}
        for name, value in seen.items():
            self.sums[name] += value
        self._last = seen

    def _show(self, lr: float) -> None:
        if self._bar is None or (now := time.monotonic()) - self._shown < 0.5:
            return
        self._shown = now
        rate = (self.step - self._resumed_at) * self.config.batch_size / max(now - self._begun, 1e-9)
        terms = "  ".join(f"{name} {float(value):.3f}" for name, value in self._last.items())
        self._bar.update(self._task, completed=self.step, terms=f"{terms}  lr {lr:.4f}  {rate:,.0f} images/s")

    _shown = 0.0

    def _end_epoch(self, epoch: int, seconds: float, steps: int) -> None:
        """Metrics, validation and a checkpoint."""
        row: dict[str, Any] = {"epoch": epoch + 1, "step": self.step, "lr": self._lr_of_last_step()}
        sums = torch.stack(list(self.sums.values())) / self.loader.steps  # waits for the device
        if self.world > 1:
            dist.all_reduce(sums)
            sums /= self.world
        row |= dict(zip(self.sums, sums.tolist()))
        self.sums = {}
        if not math.isfinite(row["loss"]):
            raise TrainingError(
                f"the loss became {row['loss']} in epoch {epoch + 1}; lower lr, set grad_clip, or use "
                "precision='float32'. The last checkpoint is from before it"
            )
        self._seconds += seconds
        validation = 0.0
        every = self.config.validate_every
        if self.held_out is not None and every and ((epoch + 1) % every == 0 or epoch + 1 == self.config.epochs):
            started = time.perf_counter()
            row["held_out"] = self.validate()
            validation = time.perf_counter() - started
        better = "held_out" in row and (self.best is None or row["held_out"]["score"] > self.best["held_out"]["score"])
        if better:
            self.best = row
        if self.lead:
            with (self.run.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            images = steps * self.config.batch_size
            timing = {
                "epoch": epoch + 1,
                "steps": steps,
                "seconds": seconds,
                "first_step_seconds": self._first_step,
                "validation_seconds": validation,
                "images_per_second": images / seconds,
            }
            with (self.run.folder / "timing.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(timing) + "\n")
            if self._board is not None:
                for name, value in _flat(row):
                    self._board.add_scalar(name, value, epoch + 1)
        self._first_step = 0.0
        self.say(_line(row, seconds))
        self._save()
        if better and self.lead:
            checkpoint.alias(self.run.checkpoints, "last", "best")
        self._together()

    def _lr_of_last_step(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Accuracy on held-out images: clean ones through the clean branch, attacked ones through the adversarial one.

        Their sum is the ``score`` that the best checkpoint is chosen by (paper C, app. B): never the test set.
        """
        config, held_out = self.config, self.held_out
        assert held_out is not None
        attack = attack_names.get(
            config.validation_attack, threat=ThreatModel(norm=config.threat, eps=config.eps), seed=config.seed
        )
        limit = len(held_out) if config.validation_images is None else min(config.validation_images, len(held_out))
        loader = make_loader(
            held_out.take(torch.arange(limit)),
            batch_size=VALIDATION_BATCH.get(self.device.type, 250) * self.world,
            augment="none",
            device=self.device,
            rank=self.rank,
            world=self.world,
            shuffle=False,
            drop_last=False,
            channels_last=self.loader.channels_last,
        )
        known = domains(self.model)
        clean, adv = (domain if domain in known else None for domain in ("clean", "adv"))
        right = torch.zeros(2, dtype=torch.float64, device=self.device)
        averaged = nullcontext() if self.ema is None else self.ema.swapped(self.model)
        with averaged, self._computing():
            for x, y, index in loader.epoch(0):
                if not len(x):
                    continue
                x_adv = dataclasses.replace(attack, route=adv)(self.model, x, y, index=index)
                for position, (images, branch) in enumerate(((x, clean), (x_adv, adv))):
                    with attacked(self.model, route=branch) as predict, torch.no_grad():
                        right[position] += (predict(images).argmax(1) == y).sum()
        if self.world > 1:
            dist.all_reduce(right)
        accuracy = (right / limit).tolist()
        return {"clean": accuracy[0], config.validation_attack: accuracy[1], "score": sum(accuracy)}

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        if self.lead:
            tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
            state, optimizer = checkpoint.flatten_optimizer(self.optimizer, self.names)
            tensors |= state
            meta: dict[str, Any] = {"step": self.step, "optimizer": optimizer, "best": self.best}
            if self.ema is not None:
                ema = self.ema.state_dict()
                tensors |= {f"ema.{name}": value for name, value in ema["average"].items()}
                meta["ema_updates"] = ema["updates"]
            tensors |= {f"sums.{name}": value for name, value in self.sums.items()}
            meta |= {"sums": list(self.sums), "seconds": self._seconds}
            meta["lines"] = {name: _size(self.run.folder / name) for name in ("metrics.jsonl",)}
            checkpoint.save(self.run.checkpoints, "last", tensors, meta)
        self._together()

    def _resume(self) -> None:
        """Take up the last checkpoint, where there is one; what was written after it is taken back."""
        self._begun = time.monotonic()
        if checkpoint.exists(self.run.checkpoints, "last"):
            tensors, meta = checkpoint.load(self.run.checkpoints, "last")
            part = {key.removeprefix("model."): value for key, value in tensors.items() if key.startswith("model.")}
            checkpoint.restore_model(self.model, part, f"the checkpoint of {self.run.folder}")
            checkpoint.restore_optimizer(self.optimizer, self.names, tensors, meta["optimizer"])
            if self.ema is not None:
                average = {key.removeprefix("ema."): value for key, value in tensors.items() if key.startswith("ema.")}
                self.ema.load_state_dict({"average": average, "updates": meta["ema_updates"]})
            self.sums = {name: tensors[f"sums.{name}"].to(self.device) for name in meta["sums"]}
            self.step, self.best, self._seconds = meta["step"], meta["best"], meta["seconds"]
            if self.lead:
                for name, size in meta["lines"].items():
                    _cut(self.run.folder / name, size)
            self.say(f"going on from step {self.step} of {self.config.epochs * self.loader.steps}")
        elif self.lead:
            _cut(self.run.folder / "metrics.jsonl", 0)
        self._resumed_at = self.step
        self._together()

    def _finish(self) -> None:
        metrics = self.run.metrics() if self.lead else []
        if self.lead:
            write_json(
                self.run.folder / "record.json",
                {
                    **self.run.description,
                    "last": metrics[-1],
                    "best": self.best,
                    "seconds": self._seconds,
                    "precision": self.precision,
                    "processes": self.world,
                    "peak_memory": torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None,
                    **environment(self.device),
                },
            )
            self.say(f"finished in {self._seconds:.0f} s of training: {self.run.folder}")
        self._together()


def build_objective(config: Config, model: nn.Module) -> Objective:
    """The objective of a configuration on a model."""
    kind = OBJECTIVES.get(config.objective.name)
    attack = config.build_attack() if kind.needs_attack else None
    return kind(model, attack, label_smoothing=config.label_smoothing, **config.objective.options)


def start_from(model: nn.Module, weights: str) -> None:
    """Fill a model from a safetensors file or from the checkpoint of a run."""
    if Path(weights).is_dir():
        source = Run.open(weights).model()
        checkpoint.restore_model(model, source.state_dict(), f"the run {weights}")
    else:
        checkpoint.load_weights(model, weights)


def _leaves_banks_unused(objective: Objective) -> bool:
    """Whether some parameters get no gradient in a step, so that DDP must look for them (trap of one-sided routes)."""
    trained = set(objective.trained_domains())
    return any(
        {module.plan.affine[module.plan.index(domain)] for domain in trained & set(module.plan.domains)}
        != set(module.plan.affine_banks)
        for module in routed_modules(objective.model).values()
    )


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ConfigError("TensorBoard is not installed; pip install 'advnorm[tensorboard]', or leave it out") from None
    return SummaryWriter(str(folder / "tensorboard"))


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        elif name not in ("epoch", "step"):
            yield f"{prefix}{name}", value


def _line(row: Mapping[str, Any], seconds: float) -> str:
    parts = [f"epoch {row['epoch']:3d}"]
    for name, value in _flat(row):
        if name.endswith("accuracy") or name.startswith("held_out/"):
            if not name.endswith("score"):
                parts.append(f"{name.replace('_accuracy', ' acc').replace('held_out/', 'held-out ')} {value:.1%}")
        elif name != "lr":
            parts.append(f"{name} {value:.4f}")
    return "  ".join([*parts, f"{seconds:.1f} s"])


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cut(path: Path, size: int) -> None:
    if path.exists():
        os.truncate(path, size)
