"""Running tasks in several processes: on the local devices, or on a Ray cluster."""

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
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, Problem, collect_problems, raise_problems, unknown_name
from advnorm._core.locks import is_held
from advnorm.studies.run import Outcome, run_task
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task

Launcher = Literal["local", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "ray")
#: Seconds to wait until the process of a lost node, or of a killed launcher, releases its run.
RELEASE_SECONDS = 60.0


def launch(
    tasks: Sequence[Task],
    *,
    launcher: Launcher = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
    retries: int = 1,
    on_outcome: Callable[[Outcome], None] | None = None,
    store: RecordStore | None = None,
) -> list[Outcome]:
    """Run tasks in parallel, each in its own process; the outcomes have the order of the tasks.

    ``"local"`` runs ``processes`` tasks on each of ``devices``: by default the devices that the tasks name, else every
    GPU, else the CPU. The threads of this process are divided among them. Processes are spawned: call this function
    under ``if __name__ == "__main__":``.

    ``"ray"`` submits them to the Ray cluster at ``address`` (None: a running local cluster, or a new one), with one GPU
    each if the cluster has GPUs, else one core. Every node needs advnorm, and ``out`` and ``data_dir`` at the same path
    of a shared file system that supports locks.

    Tasks that share a training, or depend on each other, run one after another. A task that fails, or whose process or
    node dies, is retried ``retries`` times in a new process and resumes from its checkpoint; a wrong configuration is
    not retried. ``on_outcome`` is called in this process, once per task.
    """
    problems = launch_problems(
        tasks, launcher=launcher, devices=devices, processes=processes, address=address, retries=retries
    )
    raise_problems(problems, "cannot launch")
    store = store or RecordStore(tasks[0].out if tasks else "")
    outcomes = {task: Outcome(task=task) for task in tasks if store.state(task) == "done"}
    report = on_outcome or (lambda outcome: None)
    for outcome in outcomes.values():
        report(outcome)
    waiting = deque(deque(chain) for chain in group_into_chains(task for task in tasks if task not in outcomes))
    running: dict[Task, deque[Task]] = {}
    attempts: Counter[Task] = Counter()
    with RayPool(tasks, address) if launcher == "ray" else LocalPool(_devices(tasks, devices) * processes) as pool:
        while waiting or running:
            while waiting and pool.has_room():
                chain = waiting.popleft()
                running[chain[0]] = chain
                pool.start(chain[0])
            task, result = pool.wait_for_next()
            chain = running.pop(task)
            attempts[task] += 1
            if not result.retry or attempts[task] > retries:
                outcomes[task] = Outcome(task=task, error=result.error)
                chain.popleft()
                report(outcomes[task])
            if chain:
                waiting.appendleft(chain)
    return [outcomes[task] for task in tasks]


def group_into_chains(tasks: Iterable[Task]) -> list[list[Task]]:
    """Group tasks that share a training, their own or a prerequisite's. In a chain, prerequisites come first."""
    chains: list[tuple[set[Path], list[Task]]] = []
    for task in dict.fromkeys(tasks):
        folders, members = {step.run.folder for step in task.lineage}, [task]
        unrelated = []
        for others, chain in chains:
            if others & folders:
                folders, members = others | folders, chain + members
            else:
                unrelated.append((others, chain))
        chains = [*unrelated, (folders, members)]
    return [sorted(chain, key=lambda task: len(task.lineage)) for _, chain in chains]


def launch_problems(
    tasks: Sequence[Task],
    *,
    launcher: str = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
    retries: int = 1,
) -> list[Problem]:
    """Validate the arguments of :func:`launch`."""
    problems: list[Problem] = []
    if launcher not in LAUNCHERS:
        problems.append(unknown_name("launcher", launcher, LAUNCHERS))
    for name, value, least in (("processes", processes, 1), ("retries", retries, 0)):
        if value < least:
            message = f"{{field}} must be at least {least}"
            problems.append(Problem(code="out_of_range", message=message, field=name, got=value))
    if launcher == "ray" and (devices is not None or processes > 1):
        message = "{field} and processes apply to the launcher 'local' only"
        problems.append(Problem(code="conflict", message=message, field="devices", hint="leave them out"))
    if launcher == "local":
        if address is not None:
            message, hint = "{field} names a Ray cluster", "use the launcher 'ray', or leave it out"
            problems.append(Problem(code="conflict", message=message, field="address", got=address, hint=hint))
        for device in dict.fromkeys(_devices(tasks, devices)):
            with collect_problems(problems):
                resolve_device(device)
        if not _devices(tasks, devices):
            problems.append(Problem(code="empty", message="{field} is empty", field="devices", hint="name a device"))
    return problems


def _devices(tasks: Sequence[Task], devices: Sequence[str] | None) -> list[str]:
    if devices is not None:
        return list(devices)
    named = dict.fromkeys(task.device for task in tasks if task.device is not None)
    return list(named) or [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


class AttemptResult(NamedTuple):
    """The error of one attempt, if it failed, and whether a retry may help."""

    error: str | None
    retry: bool


def try_task(task: Task) -> AttemptResult:
    """Run a task once, in the current process."""
    try:
        _wait_for_release(task.run.folder)
        run_task(task)
    except ConfigError as error:
        return AttemptResult(str(error), False)
    except Exception as error:
        return AttemptResult(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", True)
    return AttemptResult(None, False)


def _wait_for_release(folder: Path) -> None:
    """Wait for another process to leave the folder: a process that lost its node or its parent is about to end."""
    until = time.monotonic() + RELEASE_SECONDS
    while is_held(folder) and time.monotonic() < until:  # afterwards, training raises Busy
        time.sleep(0.5)


class LocalPool(AbstractContextManager["LocalPool"]):
    """One process per task, so that no memory and no broken CUDA context is left for the next task.

    The standard pools do not survive a killed worker: ``concurrent.futures`` breaks the whole pool and
    ``multiprocessing.Pool`` waits forever. They also have no device per worker. Ray alone would be a heavy dependency.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self._free = deque(devices)
        self._threads = max(1, torch.get_num_threads() // len(devices))
        self._running: dict[Connection, tuple[Any, Task, str]] = {}

    def __exit__(self, *error: object) -> None:
        processes = [process for process, *_ in self._running.values()]
        for process in processes:
            process.terminate()  # a training stops at a checkpoint
        for process in processes:
            process.join()

    def has_room(self) -> bool:
        return bool(self._free)

    def start(self, task: Task) -> None:
        device = self._free.popleft()
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_worker, args=(replace(task, device=device), self._threads, sender))
        process.start()
        sender.close()
        self._running[receiver] = process, task, device

    def wait_for_next(self) -> tuple[Task, AttemptResult]:
        """Wait until a task ends."""
        while True:
            # Pipes alone are not enough: the processes of a data loader keep a dead worker's pipe open for seconds.
            wait([*self._running, *(process.sentinel for process, *_ in self._running.values())])
            for receiver, (process, task, device) in self._running.items():
                alive = process.is_alive()  # before polling: a process may send its result and then end
                if receiver.poll() or not alive:
                    result = _receive(receiver)
                    process.join()
                    receiver.close()
                    del self._running[receiver]
                    self._free.append(device)
                    return task, result or AttemptResult(_describe_exit(process.exitcode), True)


def _receive(receiver: Connection) -> AttemptResult | None:
    try:
        return receiver.recv() if receiver.poll() else None
    except (EOFError, OSError):
        return None


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"its process ended with status {status} without a result"
    hint = ", often because the system ran out of memory" if status == -signal.SIGKILL else ""
    return f"its process was killed by {signal.Signals(-status).name}{hint}"


def _run_worker(task: Task, threads: int, sender: Connection) -> None:
    """The main function of a local process."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    if task.device is not None and torch.device(task.device).index is not None:
        torch.cuda.set_device(task.device)
    with suppress(KeyboardInterrupt):  # Ctrl-C reaches every process of a terminal; the parent reports it
        sender.send(try_task(task))


def _end_with_parent() -> None:
    """Stop if the launcher was killed: the same command resumes the task."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


class RayPool(AbstractContextManager["RayPool"]):
    """Ray tasks. Ray queues tasks until a node has room, and starts a process for each."""

    def __init__(self, tasks: Sequence[Task], address: str | None) -> None:
        try:
            self._ray: Any = importlib.import_module("ray")
        except ImportError:
            hint = "pip install 'advnorm[ray]', or use the launcher 'local'"
            raise ConfigError("not_installed", "Ray is not installed", field="launcher", hint=hint) from None
        self._owns_cluster = not self._ray.is_initialized()
        if self._owns_cluster:
            try:
                self._ray.init(address=address, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                message, hint = f"no Ray cluster at {address!r}: {error}", "start one with `ray start --head`"
                raise ConfigError("no_cluster", message, field="address", hint=hint) from None
        self._has_gpus = self._ray.cluster_resources().get("GPU", 0) > 0
        self._running: dict[Any, Task] = {}
        if not self._has_gpus and any(self._device_type(task) == "cuda" for task in tasks):
            self.__exit__()
            raise ConfigError("no_device", "the Ray cluster has no GPU", field="device", hint="leave device out")

    def _device_type(self, task: Task) -> str:
        return ("cuda" if self._has_gpus else "cpu") if task.device is None else torch.device(task.device).type

    def __exit__(self, *error: object) -> None:
        if self._owns_cluster:
            self._ray.shutdown()  # ends its processes
            return
        for reference in self._running:
            self._ray.cancel(reference, force=True)

    def has_room(self) -> bool:
        return True

    def start(self, task: Task) -> None:
        device = self._device_type(task)
        # A node has its own working directory, and Ray numbers the devices that it assigns.
        data_dir = None if task.data_dir is None else str(Path(task.data_dir).absolute())
        remote = replace(task, device=device, out=str(Path(task.out).absolute()), data_dir=data_dir)
        # The launcher counts attempts, also after lost nodes. Like the local pool: a new process per task.
        settings = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_retries": 0, "max_calls": 1}
        self._running[self._ray.remote(**settings)(try_task).remote(remote)] = task

    def wait_for_next(self) -> tuple[Task, AttemptResult]:
        [reference], _ = self._ray.wait(list(self._running), num_returns=1)
        task = self._running.pop(reference)
        try:
            return task, self._ray.get(reference)
        except self._ray.exceptions.RayError as error:  # a node or process was lost, or cannot import advnorm
            return task, AttemptResult(f"{type(error).__name__}: {error}", True)
