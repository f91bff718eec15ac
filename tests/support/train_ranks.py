"""One process of the distributed trainings: ``python train_ranks.py fast|slow RANK WORLD INIT_FILE FOLDER``.

All fast or all slow cases run in one launch of the processes, each into FOLDER/CASE; test_distributed.py compares them
with the same cases in one process (``fast|slow FOLDER``). What a case did is saved in FOLDER/rankR.json; one that fails
is stored as its error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import advnorm
from advnorm import Config
from advnorm._core.records import digest
from advnorm.training import checkpoint, loop, step_program
from advnorm.training.validation import Validation
from support.ranks import join_ranks
from support.train_worker import EVERY_STEP, NEVER, SMALL, patched

WORLD, STEPS = 2, 12
LONG: dict[str, Any] = {
    **SMALL,
    "data": {**SMALL["data"], "size": 16 * STEPS // 2 + 16},
    "batch_size": 16,
    "epochs": 2,
    "lr": 0.01,
    "sync_statistics": True,
}


def synchronized(*combinations: tuple[str, str, str]) -> dict[str, Config]:
    return {
        f"{objective}-{norm}-{layout}": Config.from_dict(
            {**LONG, "norm": norm, "objective": {"name": objective, "layout": layout}}
        )
        for objective, norm, layout in combinations
    }


SYNCHRONIZED = synchronized(
    ("hybrid", "dual_bn", "concatenated"),
    ("hybrid", "dual_affine_bn", "sequential"),
    ("hybrid", "cross_bn", "concatenated"),
    ("hybrid", "gmm_bn", "concatenated"),
    ("trades", "dual_bn", "sequential"),
    ("trades", "dual_affine_bn", "concatenated"),
    ("trades", "gmm_bn", "concatenated"),
)
SYNCHRONIZED["share"] = Config.from_dict(
    {**LONG, "norm": "dual_bn", "objective": {"name": "hybrid", "clean_share": 0.25}}
)
#: For networks of a library.
COLOUR: dict[str, Any] = {**LONG, "data": {**LONG["data"], "image_size": 32, "channels": 3}}
TIMM = find_spec("timm") is not None
if TIMM:
    SYNCHRONIZED["timm-dual_bn"] = Config.from_dict({**COLOUR, "norm": "dual_bn", "model": "timm:test_efficientnet"})
#: The other combinations that exist.
SLOW = synchronized(
    ("hybrid", "dual_bn", "sequential"),
    ("hybrid", "dual_affine_bn", "concatenated"),
    ("trades", "dual_bn", "concatenated"),
    ("trades", "dual_affine_bn", "sequential"),
    ("trades", "cross_bn", "concatenated"),
)
#: DDP must expect parameters without a gradient: those of one domain.
UNUSED = {
    "classical-dual_bn": Config.from_dict({**LONG, "norm": "dual_bn", "objective": "classical"}),
    "cross-cross_bn": Config.from_dict({**LONG, "norm": "cross_bn", "objective": "cross"}),
    "standard-dual_head": Config.from_dict({**LONG, "norm": "dual_bn", "objective": "standard", "dual_head": True}),
}
#: Parameters, gradients, optimizer states and averages in two parts.
SHARDED = {
    "fsdp-dual_bn": Config.from_dict({**LONG, "norm": "dual_bn", "parallel": "fsdp", "ema": 0.9, "grad_clip": 0.5}),
    "fsdp-dual_affine_ln": Config.from_dict(
        {**LONG, "norm": "dual_affine_ln", "parallel": "fsdp", "sync_statistics": False, "optimizer": "adamw"}
    ),
    "fsdp-classical": Config.from_dict(
        {
            **LONG,
            "norm": "dual_bn",
            "model": {"name": "resnet18", "width": 0.05},
            "objective": "classical",
            "parallel": "fsdp",
            "recompute": True,
            "epochs": 1,
        }
    ),
    "fsdp-parts": Config.from_dict(
        {**LONG, "norm": "dual_affine_gn", "parallel": "fsdp", "sync_statistics": False, "accumulate": 2}
    ),
    "ddp-parts": Config.from_dict({**LONG, "norm": "dual_affine_gn", "sync_statistics": False, "accumulate": 2}),
}
if TIMM:
    vit = {"name": "timm:test_vit", "img_size": 32}
    SHARDED["fsdp-timm"] = Config.from_dict(
        {**COLOUR, "norm": "dual_affine_ln", "model": vit, "parallel": "fsdp", "sync_statistics": False}
    )
#: Two processes train these as one.
COMPARED = {"fast": SYNCHRONIZED | UNUSED, "slow": SLOW, "sharded": SHARDED}
OWN = Config.from_dict({**LONG, "norm": "dual_bn", "sync_statistics": False, "ema": 0.9, "ema_buffers": "average"})

#: The attack moves the statistics of each process by its own images, though training pools them.
MOVED = replace(OWN, sync_statistics=True, attack=replace(OWN.attack, statistics="batch"))
#: One image for each process, of which the last norms have one value: enough for statistics that are pooled.
SINGLE = Config.from_dict(
    {
        **LONG,
        "norm": "dual_bn",
        "data": {**LONG["data"], "size": 20},
        "model": {"name": "resnet18", "width": 0.125},
        "batch_size": 2,
    }
)

CALLS = {"bucket": 0, "gather": 0, "scatter": 0}
VALIDATED: list[str] = []  # fingerprints of the models that were validated


class Counting(DistributedDataParallel):
    """Counts the buckets of gradients that are reduced."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_comm_hook(dist.group.WORLD, hook)


def hook(state, bucket):  # no annotations: DDP wants the types themselves, not their names
    CALLS["bucket"] += 1
    return allreduce_hook(state, bucket)


def count_collectives() -> None:
    """Count how often sharded parameters are gathered and gradients reduced."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    for name, kind in (("gather", collectives.DefaultAllGather), ("scatter", collectives.DefaultReduceScatter)):
        original = kind.__call__

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            CALLS[name] += 1
            return original(*args, **kwargs)

        kind.__call__ = counted


def fingerprint(model: torch.nn.Module) -> str:
    """A hash of clones: the memory of a gathered parameter that NumPy has seen cannot be freed."""
    return digest(*(value.detach().clone() for value in (*model.parameters(), *model.buffers())))


def remember_evaluated() -> None:
    original = Validation.__call__

    def remembered(self: Validation, model: torch.nn.Module, *stopped: Any) -> dict[str, float] | None:
        VALIDATED.append(fingerprint(model))
        return original(self, model, *stopped)

    Validation.__call__ = remembered


def trained(config: Config, out: Path, **settings: Any) -> dict[str, Any]:
    CALLS.update(dict.fromkeys(CALLS, 0))
    VALIDATED.clear()
    run = advnorm.train(config, out=out, device="cpu", **settings)
    return {"finished": run.finished, "folder": str(run.folder), "validated": list(VALIDATED), **CALLS}


def trained_in_float64(config: Config, out: Path, **settings: Any) -> dict[str, Any]:
    """With a network in float64, for an exact comparison of one process with two.

    PGD takes the sign of a gradient. In float32 the processes' other order of summation changes some signs, from a
    difference of 6e-8 on: adversarial images then differ by whole steps, and the weights by 1e-3 a step later.
    """
    make = loop.build_model
    loop.build_model = lambda *of: make(*of).double()
    try:
        return trained(config, out, **settings)
    finally:
        loop.build_model = make


def stopped(config: Config, out: Path, rank: int) -> dict[str, Any]:
    """SIGTERM to the last rank in mid-epoch stops all; then all resume."""
    original = loop.TrainingLoop.train_step
    if rank == WORLD - 1:
        patched(loop.TrainingLoop, "train_step", before=lambda *_: os.kill(os.getpid(), signal.SIGTERM), at=3)
    first = trained(config, out)
    loop.TrainingLoop.train_step = original
    meta = checkpoint.load(Path(first["folder"]) / "checkpoints", "last")[1]
    dist.barrier()
    return {"first": first, "step": meta["step"], **trained(config, out, checkpoint_minutes=EVERY_STEP)}


def raised(config: Config, out: Path) -> dict[str, Any]:
    try:
        return trained(config, out)
    except advnorm.AdvnormError as error:
        return {"problems": [(problem.code, problem.field) for problem in error.problems]}


def full_disk(config: Config, out: Path, rank: int) -> dict[str, Any]:
    """The first rank cannot write its checkpoint."""

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    original = checkpoint.write_atomic
    if rank == 0:
        checkpoint.write_atomic = fail
    try:
        return raised(config, out)
    finally:
        checkpoint.write_atomic = original


def main(speed: str, rank: int, world: int, init_file: str, folder: Path) -> None:
    join_ranks(rank, world, init_file)
    step_program.DistributedDataParallel, loop.AGREE_EVERY = Counting, 4
    remember_evaluated()
    count_collectives()
    cases = {name: (trained_in_float64, config) for name, config in COMPARED[speed].items()}
    others = {
        "own": (trained, OWN),
        "own_plain": (trained, replace(OWN, ema=None)),
        "moved": (trained, MOVED),
        "single": (trained, SINGLE),
        "stopped": (lambda config, out: stopped(config, out, rank), OWN),
        "nan": (raised, Config.from_dict({**LONG, "lr": 1e30})),
        "full_disk": (lambda config, out: full_disk(config, out, rank), Config.from_dict(LONG)),
        "odd_share": (raised, Config.from_dict({**LONG, "objective": {"name": "hybrid", "clean_share": 0.3}})),
        "odd_batch": (raised, Config.from_dict({**LONG, "batch_size": 15})),
    }
    sharded = {
        "fsdp-stopped": (lambda config, out: stopped(config, out, rank), SHARDED["fsdp-dual_bn"]),
        "fsdp-whole": (trained, SHARDED["fsdp-dual_bn"]),
        "fsdp-own": (trained, replace(SHARDED["fsdp-dual_bn"], sync_statistics=False, ema_buffers="average")),
    }
    cases |= {"fast": others, "sharded": sharded}.get(speed, {})
    seen: dict[str, Any] = {}
    for name, (act, config) in cases.items():
        try:
            seen[name] = act(config, folder / name)
        except Exception as error:
            seen[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    (folder / f"rank{rank}.json").write_text(json.dumps(seen))
    sys.stdout.flush()
    os._exit(0)  # without the farewell of reducers that a failure left in the middle of their work


def alone(speed: str, folder: Path) -> None:
    """The same in one process."""
    torch.set_num_threads(1)
    for name, config in COMPARED[speed].items():
        trained_in_float64(config, folder / name, checkpoint_minutes=NEVER)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        alone(sys.argv[1], Path(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], Path(sys.argv[5]))
