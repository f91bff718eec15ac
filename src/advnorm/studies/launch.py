"""Running tasks in several processes: on the local devices, or on a Ray cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from advnorm._core.devices import resolve_device
from advnorm._core.errors import ConfigError, Problem, collect_problems, raise_problems, unknown_name
from advnorm.studies.run_tasks import Pool, TaskResult, TrainingStopped, attempt_task, run_tasks
from advnorm.studies.store import RecordStore
from advnorm.studies.task import Task

Launcher = Literal["local", "ray"]
LAUNCHERS: tuple[Launcher, ...] = ("local", "ray")


def launch(
    tasks: Sequence[Task],
    *,
    launcher: Launcher = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
    **options: Any,
) -> list[TaskResult]:
    """Run tasks in parallel, each in its own process; ``options`` are those of :func:`run_tasks`.

    ``"local"`` runs ``processes`` tasks on each of ``devices``: by default the devices that the tasks name, else every
    GPU, else the CPU. The threads of this process are divided among them. Processes are spawned: call this function
    under ``if __name__ == "__main__":``.

    ``"ray"`` submits them to the Ray cluster at ``address`` (None: a running local cluster, or a new one), with one GPU
    each if the cluster has GPUs, else one core. Every node needs advnorm, and ``out`` and ``data_dir`` at the same path
    of a shared file system that supports locks.

    A task whose process or node dies is retried in a new process.
    """
    problems = launch_problems(tasks, launcher=launcher, devices=devices, processes=processes, address=address)
    raise_problems(problems, "cannot launch")
    with RayPool(tasks, address) if launcher == "ray" else LocalPool(_devices(tasks, devices) * processes) as pool:
        return run_tasks(tasks, pool=pool, **options)


def launch_problems(
    tasks: Sequence[Task],
    *,
    launcher: str = "local",
    devices: Sequence[str] | None = None,
    processes: int = 1,
    address: str | None = None,
) -> list[Problem]:
    """Validate the arguments of :func:`launch`."""
    problems: list[Problem] = []
    if launcher not in LAUNCHERS:
        problems.append(unknown_name("launcher", launcher, LAUNCHERS))
    if processes < 1:
        problems.append(Problem("out_of_range", "{field} must be at least 1", "processes", got=processes))
    if launcher == "ray" and (devices is not None or processes > 1):
        message = "{field} and processes apply to the launcher 'local' only"
        problems.append(Problem(code="conflict", message=message, field="devices", hint="leave them out"))
    if launcher == "local" and address is not None:
        message, hint = "{field} names a Ray cluster", "use the launcher 'ray', or leave it out"
        problems.append(Problem(code="conflict", message=message, field="address", got=address, hint=hint))
    for device in _devices(tasks, devices) if launcher == "local" else ():
        with collect_problems(problems):
            resolve_device(device)
    return problems


def _devices(tasks: Sequence[Task], devices: Sequence[str] | None) -> list[str]:
    named = devices or dict.fromkeys(task.device for task in tasks if task.device is not None)
    return list(named) or [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]


def try_task(task: Task) -> TaskResult:
    """Run a task once, in a process of its own."""
    try:
        return attempt_task(task, RecordStore(task.out))
    except TrainingStopped as stopped:  # its process or node is about to end, unlike the launcher
        return TaskResult(task=task, error=str(stopped), retry=True)


class LocalPool(Pool):
    """One process per task, so that no memory and no broken CUDA context is left for the next task.

    The standard pools do not survive a killed worker: ``concurrent.futures`` breaks the whole pool and
    ``multiprocessing.Pool`` waits forever. They also have no device per worker. Ray alone would be a heavy dependency.
    """

    def __init__(self, devices: Sequence[str]) -> None:
        self.room, self._free = len(devices), list(devices)
        self._threads = max(1, torch.get_num_threads() // len(devices))
        self._running: dict[Connection, tuple[Any, Task, str]] = {}

    def __exit__(self, *error: object) -> None:
        processes = [process for process, *_ in self._running.values()]
        for process in processes:
            process.terminate()  # a training stops at a checkpoint
        for process in processes:
            process.join()

    def start(self, task: Task) -> None:
        device = self._free.pop(0)
        context = multiprocessing.get_context("spawn")
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_run_worker, args=(replace(task, device=device), self._threads, sender))
        process.start()
        sender.close()
        self._running[receiver] = process, task, device

    def wait_for_next(self) -> TaskResult:
        while True:
            # Pipes alone are not enough: the processes of a data loader keep a dead worker's pipe open for seconds.
            wait([*self._running, *(process.sentinel for process, *_ in self._running.values())])
            for receiver, (process, task, device) in self._running.items():
                alive = process.is_alive()  # before polling: a process may send its result and then end
                if receiver.poll() or not alive:
                    outcome = None
                    with suppress(EOFError, OSError):
                        outcome = receiver.recv() if receiver.poll() else None
                    process.join()
                    receiver.close()
                    del self._running[receiver]
                    self._free.append(device)
                    if outcome is None:
                        return TaskResult(task=task, error=_describe_exit(process.exitcode), retry=True)
                    return replace(outcome, task=task)


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


class RayPool(Pool):
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
        self.room, self._running = len(tasks), dict[Any, Task]()
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

    def start(self, task: Task) -> None:
        device = self._device_type(task)
        # A node has its own working directory, and Ray numbers the devices that it assigns.
        data_dir = None if task.data_dir is None else str(Path(task.data_dir).absolute())
        remote = replace(task, device=device, out=str(Path(task.out).absolute()), data_dir=data_dir)
        # The launcher counts attempts, also after lost nodes. Like the local pool: a new process per task.
        settings = {"num_cpus": 1, "num_gpus": int(device == "cuda"), "max_retries": 0, "max_calls": 1}
        self._running[self._ray.remote(**settings)(try_task).remote(remote)] = task

    def wait_for_next(self) -> TaskResult:
        [reference], _ = self._ray.wait(list(self._running), num_returns=1)
        task = self._running.pop(reference)
        try:
            return replace(self._ray.get(reference), task=task)
        except self._ray.exceptions.RayError as error:  # a node or process was lost, or cannot import advnorm
            return TaskResult(task=task, error=f"{type(error).__name__}: {error}", retry=True)
