"""Trainings that are killed, in processes of their own: ``python train_worker.py FOLDER``.

For every way to die it forks a child that trains and dies so, then another one that resumes, until one finishes. The
exit code of each child is written to FOLDER/codes.json; test_train.py compares the runs with one that was left alone.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, for seconds: here, and not in each of the children

import advnorm
from advnorm import Config
from advnorm._core.exit_codes import PREEMPTED
from advnorm.training import checkpoint
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.run_folder import Run

SMALL: dict[str, Any] = {
    "data": {"name": "synthetic", "size": 64, "image_size": 8, "channels": 1, "classes": 4},
    "held_out": 16,
    "model": "small_cnn",
    "batch_size": 12,
    "epochs": 3,
    "eps": 0.1,
    "attack": {"steps": 2},
    "validation_attack": "pgd1",
}
CASES = {
    "hybrid": Config.from_dict(
        {
            **SMALL,
            "norm": "dual_bn",
            "ema": 0.9,
            "schedule": "one_cycle",
            "augment": "crop_flip",
            "mix": "cutmix",
            "name": "hybrid",
        }
    ),
    "trades": Config.from_dict(
        {
            **SMALL,
            "norm": "gmm_bn",
            "objective": "trades",
            "optimizer": "adamw",
            "lr": 1e-3,
            "mix": "mixup",
            "accumulate": 3,
            "name": "trades",
        }
    ),
    "classical": Config.from_dict(
        {
            **SMALL,
            "model": {"name": "resnet18", "width": 0.05},
            "objective": "classical",
            "grad_clip": 0.5,
            "running_epochs": 1,
            "schedule": "cosine",
            "warmup_epochs": 1,
            "recompute": True,
            "name": "classical",
        }
    ),
}
EVERY_STEP, NEVER = 0.0, 1e9


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def patched(owner: Any, name: str, before: Any = None, after: Any = None, at: int = 1) -> None:
    """Call ``before`` or ``after`` the ``at``-th call of a function."""
    original = getattr(owner, name)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and before is not None:
            before(*args)
        result = original(*args, **kwargs)
        if calls == at and after is not None:
            after()
        return result

    setattr(owner, name, wrapper)


def half_a_file(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(f".{path.name}.{os.getpid()}.part").write_bytes(data[: len(data) // 2])
    die()


#: By name: how the first child dies, and how often it writes checkpoints within an epoch.
DEATHS: dict[str, tuple[Any, float]] = {
    "alone": (lambda: None, NEVER),
    "before_any_checkpoint": (lambda: patched(TrainingLoop, "train_step", before=lambda *_: die(), at=3), NEVER),
    "in_mid_epoch": (lambda: patched(TrainingLoop, "train_step", after=die, at=6), EVERY_STEP),
    "after_an_epoch": (lambda: patched(TrainingLoop, "train_step", before=lambda *_: die(), at=7), NEVER),
    "writing_half_a_checkpoint": (lambda: patched(checkpoint, "write_atomic", before=half_a_file, at=5), EVERY_STEP),
    "before_the_pointer_moves": (lambda: patched(checkpoint, "_point", before=lambda *_: die(), at=6), EVERY_STEP),
    "between_last_and_best": (lambda: patched(checkpoint, "alias", before=lambda *_: die(), at=2), NEVER),
    "between_metrics_and_checkpoint": (lambda: patched(Journal, "row", after=die, at=2), NEVER),
    "before_the_record": (lambda: patched(TrainingLoop, "_write_record", before=lambda *_: die()), NEVER),
    "by_sigterm": (
        lambda: patched(TrainingLoop, "train_step", before=lambda *_: os.kill(os.getpid(), signal.SIGTERM), at=6),
        NEVER,
    ),
    "by_sigterm_in_the_first_step": (
        lambda: patched(TrainingLoop, "train_step", before=lambda *_: os.kill(os.getpid(), signal.SIGTERM)),
        NEVER,
    ),
}


def attempt(config: Config, out: Path, prepare: Any, minutes: float) -> int:
    """The exit status of a child that trains."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            prepare()
            run = advnorm.train(config, out=out, checkpoint_minutes=minutes, device="cpu")
            status = 0 if run.finished else PREEMPTED
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_after(seconds: float) -> None:
    """At whatever instruction it is after so much work, however busy the machine: SIGPROF kills who does not listen."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


#: The first case dies in every way, the others in those that say something about their state.
FEW = ("alone", "before_any_checkpoint", "in_mid_epoch", "by_sigterm", "at_random_moments")
PAIRS = [
    (case, death) for case in CASES for death in [*DEATHS, "at_random_moments"] if case == "hybrid" or death in FEW
]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    seen: dict[str, dict[str, list[int]]] = {case: {} for case in CASES}
    for case, death in PAIRS:
        out = folder / death
        if death == "at_random_moments":
            chance, codes, most = random.Random(0), [], 0.05
            while not codes or codes[-1] == -signal.SIGPROF:
                moment = partial(die_after, chance.uniform(0.001, most))
                codes.append(attempt(CASES[case], out, moment, EVERY_STEP))
                most *= 1.2
        else:
            prepare, minutes = DEATHS[death]
            codes = [attempt(CASES[case], out, prepare, minutes)]
            if codes[0] != 0:
                codes.append(attempt(CASES[case], out, lambda: None, NEVER))
        seen[case][death] = codes
    (folder / "codes.json").write_text(json.dumps(seen))


def state(run: Run) -> dict[str, Any]:
    """All that must not depend on deaths: tensors as bytes, numbers, and the metrics as they are written."""
    found: dict[str, Any] = {"metrics": (run.folder / "metrics.jsonl").read_text()}
    for name in sorted(path.stem for path in run.checkpoints.glob("*.json")):
        tensors, meta = checkpoint.load(run.checkpoints, name)
        found[name] = {key: value.numpy().tobytes() for key, value in tensors.items()}
        found[f"{name}_meta"] = {key: value for key, value in meta.items() if key not in ("clock", "pieces")}
    times = ("seconds", "first_step_seconds", "first_step_ended", "images_per_second", "peak_memory")
    times += ("commit", "pieces", "digest")
    found["record"] = {key: value for key, value in run.record.items() if key not in times}
    found["pieces"] = [piece["from_step"] for piece in run.record["pieces"]]
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
