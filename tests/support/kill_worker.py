"""Work that is killed at random moments and resumed until it ends: ``python kill_worker.py CASE FOLDER KILLS``.

A child does the work of the case and dies after a random amount of CPU time; the next child resumes. A finished folder
is followed by a fresh one until KILLS children were killed. FOLDER/result.json has the number of kills and, for each
finished folder, a digest of all that must not depend on them; the first folder is that of an uninterrupted run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: once here, not in each child
import torch.distributed as dist

import advnorm
from advnorm import Config, Run
from advnorm.data import load
from advnorm.studies import STUDIES
from advnorm.studies.run_tasks import run_tasks
from advnorm.studies.task import list_tasks
from support.train_worker import EVERY_STEP, SMALL, die_after, state

#: Entries of records that depend on the time, or on the number of attempts.
VARYING = {"seconds", "commit", "digest", "clock", "pieces", "images_per_second", "peak_memory"}
VARYING |= {"first_step_seconds", "first_step_ended"}
THREAT = advnorm.ThreatModel(eps=0.1)


def train(folder: Path, **settings: Any) -> None:
    config = Config.from_dict({**SMALL, "norm": "dual_bn", "name": "run", **settings})
    assert advnorm.train(config, out=folder, device="cpu", checkpoint_minutes=EVERY_STEP).finished


def train_in_two_processes(folder: Path) -> None:
    """Fork the second rank. If either rank dies, the parent kills the process group of both."""
    attempt = len(list(folder.glob("init*")))
    (folder / f"init{attempt}.used").touch()
    rank = int(os.fork() == 0)
    if rank == 1:
        die_after(random.Random(attempt).uniform(0.05, 3.0))  # the timer of the parent is not inherited
    init = f"file://{folder / f'init{attempt}'}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    train(folder, sync_statistics=True)
    dist.destroy_process_group()
    if rank == 1:
        os._exit(0)
    if os.wait()[1] != 0:
        os.kill(os.getpid(), signal.SIGPROF)


def images() -> tuple[Any, Any]:
    data = load("synthetic", "test", size=48, image_size=8, channels=1, classes=4)
    return data.pixels(), data.labels


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return advnorm.create_model("small_cnn", in_channels=1, num_classes=4, norm="dual_bn").eval()


def evaluate(folder: Path) -> None:
    options: Any = {"batch_size": 8, "device": "cpu", "record": folder / "evaluation.json"}
    advnorm.benchmark(network(), images(), THREAT, ["pgd10", "fgsm", "autoattack"], ["clean", "adv"], **options)


def audit(folder: Path) -> None:
    options: Any = {"batch_size": 8, "device": "cpu", "record": folder / "audit.json", "limit": 16}
    advnorm.audit(network(), images(), THREAT, route="adv", budget="quick", **options)


def study(folder: Path) -> None:
    tasks = list_tasks(STUDIES.get("A/table6"), protocol="smoke", out=folder, device="cpu")
    assert [outcome.error for outcome in run_tasks(tasks, retries=0)] == [None] * len(tasks)


CASES: dict[str, Callable[[Path], None]] = {
    "train_ema": lambda folder: train(folder, ema=0.9),
    "train_awp": lambda folder: train(folder, second_pass="awp"),
    "train_sam": lambda folder: train(folder, second_pass="sam"),
    "train_two_processes": train_in_two_processes,
    "evaluate": evaluate,
    "audit": audit,
    "study": study,
}


def digest(folder: Path) -> str:
    """A digest of the runs and records in a folder without their times."""
    runs = [path.parent for path in sorted(folder.rglob("run.json"))]
    parts: list[Any] = [state(Run.open(run)) for run in runs]
    for part in parts:
        part["record"] = without_varying(part["record"])
        del part["pieces"]
    inside = [path for path in sorted(folder.rglob("*.json")) if not any(run in path.parents for run in runs)]
    parts += [(path.name, without_varying(json.loads(path.read_text()))) for path in inside]
    assert parts, f"nothing was written to {folder}"
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=bytes.hex).encode()).hexdigest()


def without_varying(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_varying(item) for key, item in value.items() if key not in VARYING}
    return [without_varying(item) for item in value] if isinstance(value, list) else value


def attempt(work: Callable[[Path], None], folder: Path, moment: float | None) -> int:
    """The exit status of a child in a process group of its own, which is killed with it."""
    folder.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        status = 1
        try:
            if moment is not None:
                die_after(moment)
            work(folder)
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
    return status


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(case: str, folder: Path, kills: int) -> None:
    torch.set_num_threads(1)
    chance, work, killed, digests = random.Random(case), CASES[case], 0, []
    before = cpu_seconds()
    statuses = [attempt(work, folder / "alone", None)]
    whole = cpu_seconds() - before
    digests.append(digest(folder / "alone"))
    while killed < kills:
        place = folder / f"killed{len(digests)}"
        longest = whole / 2
        while (status := attempt(work, place, chance.uniform(0.0, longest))) == -signal.SIGPROF:
            killed += 1
            longest *= 1.1  # ends also if a piece of the work needs longer than a child lives
        statuses.append(status)
        digests.append(digest(place))
    (folder / "result.json").write_text(json.dumps({"killed": killed, "statuses": statuses, "digests": digests}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
