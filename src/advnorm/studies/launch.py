"""Working on tasks in several processes: local ones, on each device, or those of a Ray cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, did_you_mean, raise_all
from advnorm._core.locks import is_held
from advnorm.studies.run import Outcome, Task, work

Launcher = Literal["local", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "ray")
#: Seconds that the process of a lost node, or of a launcher that was killed, has to let go of its run.
PATIENCE = 60.0


def launch(
    tasks: Sequence[Task],
    *,
    launcher: Launcher = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
    retries: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
) -> list[Outcome]:
    """Work on tasks side by side, each in a process of its own; the outcomes come in the order of the tasks.

    ``"local"`` keeps ``processes`` of them at work on each of ``devices``: by default those that the tasks name, else
    every GPU, else the CPU. The threads of this process are divided among them. A program that calls this does so under
    ``if __name__ == "__main__":``, because processes are spawned.

    ``"ray"`` hands them to the Ray cluster at ``address`` (``None``: one that runs here, or a new one), with a GPU each
    where the cluster has some, else with a core. Every node needs advnorm installed, and ``out`` and ``data_dir`` on a
    file system that all of them share, at the same path; it should have locks.

    Tasks that share a training, or start from another's, come one after another. A task that fails, or whose process or
    node dies, is tried again ``retries`` times in a new process, where its run goes on from its checkpoint; a wrong
    configuration is not. ``on_outcome`` is called in this process, once per task, as they end.
    """
    check(tasks, launcher=launcher, devices=devices, processes=processes, address=address, retries=retries)
    done = {task: Outcome(task=task) for task in tasks if task.state == "done"}
    tell = on_outcome or (lambda outcome: None)
    for outcome in done.values():
        tell(outcome)
    waiting = deque(deque(chain) for chain in chains(task for task in tasks if task not in done))
    working: dict[Task, deque[Task]] = {}
    tries: Counter[Task] = Counter()
    with RayPool(tasks, address) if launcher == "ray" else LocalPool(_places(tasks, devices) * processes) as pool:
        while waiting or working:
            while waiting and pool.free():
                chain = waiting.popleft()
                working[chain[0]] = chain
                pool.start(chain[0])
            task, (error, again) = pool.next()
            chain = working.pop(task)
            tries[task] += 1
            if not again or tries[task] > retries:
                done[task] = Outcome(task=task, error=error)
                chain.popleft()
                tell(done[task])
            if chain:
                waiting.appendleft(chain)
    return [done[task] for task in tasks]


def chains(tasks: Iterable[Task]) -> list[list[Task]]:
    """Tasks that have a training in common, their own or one that they start from; each after those it needs."""
    joined: list[tuple[set[Path], list[Task]]] = []
    for task in dict.fromkeys(tasks):
        folders, members = {step.run.folder for step in task.lineage}, [task]
        apart = []
        for others, chain in joined:
            if others & folders:
                folders, members = others | folders, chain + members
            else:
                apart.append((others, chain))
        joined = [*apart, (folders, members)]
    return [sorted(chain, key=lambda task: len(task.lineage)) for _, chain in joined]


def check(
    tasks: Sequence[Task],
    *,
    launcher: str = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
    retries: int = 1,
) -> None:
    """Refuse what :func:`launch` cannot do, before anything is done."""
    problems = []
    if launcher not in LAUNCHERS:
        problems.append(f"unknown launcher {launcher!r}{did_you_mean(launcher, LAUNCHERS)}")
    if processes < 1:
        problems.append(f"processes must be at least 1, got {processes}")
    if retries < 0:
        problems.append(f"retries must be at least 0, got {retries}")
    if launcher == "ray" and (devices is not None or processes > 1):
        problems.append("devices and processes are for the launcher 'local'; leave them out, Ray knows its nodes")
    if launcher == "local":
        if address is not None:
            problems.append(f"address {address!r} is that of a Ray cluster; use the launcher 'ray', or leave it out")
        for device in dict.fromkeys(_places(tasks, devices)):
            try:
                resolve_device(device)
            except ConfigError as error:
                problems += error.problems
        if not _places(tasks, devices):
            problems.append("devices is empty; name one, or leave it out")
    raise_all(problems, "cannot launch")


def _places(tasks: Sequence[Task], devices: Sequence[str] | None) -> list[str]:
    """Where the local launcher works: as it is told, else as the tasks say, else on every GPU, else on the CPU."""
    if devices is not None:
        return list(devices)
    named = dict.fromkeys(task.device for task in tasks if task.device is not None)
    return list(named) or [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


#: The error of a task, if any, and whether another try may help.
Result = tuple[str | None, bool]


def tried(task: Task) -> Result:
    """Work on a task once, in whatever process this is."""
    try:
        _wait_for(task.run.folder)
        work(task)
    except ConfigError as error:
        return str(error), False
    except Exception as error:
        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}", True
    return None, False


def _wait_for(folder: Path) -> None:
    """Let another process that trains into the folder end: one that lost its node or its parent is about to."""
    until = time.monotonic() + PATIENCE
    while is_held(folder) and time.monotonic() < until:  # then it is alive: training there is refused, with reason
        time.sleep(0.5)


class Pool(Protocol):
    """Processes somewhere that work on tasks; a scope, which stops those that still work at its end."""

    def __enter__(self) -> Pool: ...
    def __exit__(self, *error: object) -> None: ...
    def free(self) -> bool:
        """Whether another task can be taken."""
        ...

    def start(self, task: Task) -> None: ...
    def next(self) -> tuple[Task, Result]:
        """Wait until a task ends."""
        ...


class LocalPool(Pool):
    """A process per task, which leaves nothing behind for the next one: no memory, no broken CUDA context."""

    def __init__(self, places: Sequence[str]) -> None:
        self._free = deque(places)
        self._threads = max(1, torch.get_num_threads() // len(places))
        self._working: dict[Connection, tuple[Any, Task, str]] = {}

    def __enter__(self) -> LocalPool:
        return self

    def __exit__(self, *error: object) -> None:
        processes = [process for process, *_ in self._working.values()]
        for process in processes:
            process.terminate()  # a training stops at a checkpoint
        for process in processes:
            process.join()

    def free(self) -> bool:
        return bool(self._free)

    def start(self, task: Task) -> None:
        place = self._free.popleft()
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_process, args=(replace(task, device=place), self._threads, sender))
        process.start()
        sender.close()
        self._working[receiver] = process, task, place

    def next(self) -> tuple[Task, Result]:
        while True:
            # Not the pipes alone: a loader's processes hold that of a dead worker open for some seconds.
            wait([*self._working, *(process.sentinel for process, *_ in self._working.values())])
            for receiver, (process, task, place) in self._working.items():
                alive = process.is_alive()  # asked before the pipe, which is full when its process ends
                if receiver.poll() or not alive:
                    result = _received(receiver)
                    process.join()
                    receiver.close()
                    del self._working[receiver]
                    self._free.append(place)
                    return task, result or (_death(process.exitcode), True)


def _received(receiver: Connection) -> Result | None:
    """What a process sent before its end, if anything."""
    try:
        return receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        return None


def _death(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status} and said nothing"
    hint = ", often because the system ran out of memory" if status == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-status).name}{hint}"


def _process(task: Task, threads: int, sender: Connection) -> None:
    """The life of a local process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if task.device is not None and torch.device(task.device).index is not None:
        torch.cuda.set_device(task.device)
    with suppress(KeyboardInterrupt):  # Ctrl-C reaches every process of a terminal; the parent tells it
        sender.send(tried(task))


def _end_with_parent() -> None:
    """Stop where the launcher was killed: nobody would hear of this task, and the same command goes on with it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class RayPool(Pool):
    """Ray tasks; Ray queues what its nodes cannot take yet, and starts a process for each."""

    def __init__(self, tasks: Sequence[Task], address: str | None) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            raise ConfigError("Ray is not installed; pip install 'advnorm[ray]', or use the launcher 'local'") from None
        self._ours = not self._ray.is_initialized()
        if self._ours:
            try:
                self._ray.init(address=address, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise ConfigError(
                    f"no Ray cluster at {address!r}: {error}; start one with `ray start --head`"
                ) from None
        self._gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        self._working: dict[Any, Task] = {}
        if not self._gpus and any(self._kind(task) == "cuda" for task in tasks):
            self.__exit__()
            raise ConfigError("a task wants device 'cuda', and the Ray cluster has no GPU; leave device out")

    def _kind(self, task: Task) -> str:
        return ("cuda" if self._gpus else "cpu") if task.device is None else torch.device(task.device).type

    def __enter__(self) -> RayPool:
        return self

    def __exit__(self, *error: object) -> None:
        if self._ours:
            self._ray.shutdown()  # ends its processes
            return
        for reference in self._working:
            self._ray.cancel(reference, force=True)

    def free(self) -> bool:
        return True

    def start(self, task: Task) -> None:
        device = self._kind(task)
        # Another node has another working directory, and numbers its devices as Ray gives them out.
        data_dir = None if task.data_dir is None else str(Path(task.data_dir).absolute())
        there = replace(task, device=device, out=str(Path(task.out).absolute()), data_dir=data_dir)
        # Tries are counted by the launcher, errors and lost nodes alike; a new process for each, as on one machine.
        settings = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_retries": 0, "max_calls": 1}
        self._working[self._ray.remote(**settings)(tried).remote(there)] = task

    def next(self) -> tuple[Task, Result]:
        [reference], _ = self._ray.wait(list(self._working), num_returns=1)
        task = self._working.pop(reference)
        try:
            return task, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # a node or process is lost, or cannot import advnorm
            return task, (f"{type(error).__name__}: {error}", True)
