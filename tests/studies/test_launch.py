"""Launchers give the same numbers as one process, even if a process or node dies; nothing is lost or run twice."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm import ConfigError
from advnorm._core.locks import exclusive
from advnorm._core.records import read_json
from advnorm.studies import STUDIES
from advnorm.studies import launch as launching
from advnorm.studies.launch import launch
from advnorm.studies.run_tasks import TaskResult, group_into_chains, run_task, run_tasks
from advnorm.studies.task import Task, list_tasks
from support.problems import raises_problem

linux = pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")


def todo(out):
    """Two trainings and two records: both studies have Dual BN at 16/255."""
    one, two = (list_tasks(STUDIES.get(f"A/table{n}"), protocol="smoke", out=out, device="cpu") for n in (1, 7))
    return [*one, two[0]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The records of one process."""
    outcomes = run_tasks(todo(tmp_path_factory.mktemp("alone")))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return [run_task(outcome.task) for outcome in outcomes]


def assert_nothing_lost_and_nothing_done_twice(out, alone, killed):
    """All records with the values of one process; each training ended once, and only the killed one began twice."""
    assert [task.record_path.exists() for task in todo(out)] == [True, True, False]
    found = [run_task(task) for task in todo(out)]
    assert [record["values"] for record in found] == [record["values"] for record in alone]
    assert [record["run"]["last"] for record in found] == [record["run"]["last"] for record in alone]
    logs = {folder: (folder / "log.txt").read_text() for folder in (out / "runs").iterdir()}
    assert len(logs) == 2
    assert {folder: log.count("finished after") for folder, log in logs.items()} == dict.fromkeys(logs, 1)
    assert {folder: log.count(" steps of ") for folder, log in logs.items()} == {f: 1 + (f == killed) for f in logs}


def holder(lock):
    """The process that has the file open."""
    for entry in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if entry.readlink() == lock:
                return int(entry.parts[2])
    return None


@contextmanager
def a_death_in_training(out, kill):
    """Scope: the first process that is found training under ``out`` is stopped there and then, and killed."""
    over, killed = threading.Event(), []

    def watch():
        while not over.wait(0.01):
            for lock in out.glob("runs/*/.lock"):
                pid = holder(lock)
                if pid is None or pid == os.getpid():
                    continue
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    log = lock.with_name("log.txt")
                    if log.exists() and " steps of " in log.read_text() and not lock.with_name("record.json").exists():
                        kill(pid)
                        killed.append(lock.parent)
                        return
                    os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@linux
@pytest.mark.world_size
def test_local_processes_give_the_records_of_one_process_even_if_one_is_killed(tmp_path, alone):
    reported = []
    with a_death_in_training(tmp_path, lambda pid: os.kill(pid, signal.SIGKILL)) as killed:
        outcomes = launch(todo(tmp_path), processes=2, on_result=reported.append)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.task for outcome in outcomes] == todo(tmp_path)
    assert sorted(map(str, reported)) == sorted(map(str, outcomes))
    assert len(killed) == 1
    assert_nothing_lost_and_nothing_done_twice(tmp_path, alone, killed[0])


@linux
@pytest.mark.world_size
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
def test_a_ray_cluster_gives_the_records_of_one_process_even_if_a_node_is_killed(tmp_path, alone, monkeypatch):
    from ray.cluster_utils import Cluster

    monkeypatch.chdir(tmp_path)  # a relative path means the same folder on every node
    small = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]

        def kill(pid):
            raylet = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            node = next(n for n in nodes if n.all_processes["raylet"][0].process.pid == raylet)
            cluster.remove_node(node, allow_graceful=False)
            os.kill(pid, signal.SIGKILL)

        with a_death_in_training(tmp_path, kill) as killed:
            outcomes = launch(todo("."), launcher="ray", address=cluster.address)
        assert len(cluster.worker_nodes) == 1
    finally:
        cluster.shutdown()
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert [outcome.task for outcome in outcomes] == todo(".")
    assert_nothing_lost_and_nothing_done_twice(tmp_path, alone, killed[0])


@linux
@pytest.mark.world_size
@pytest.mark.slow
def test_processes_end_with_a_killed_launcher_and_the_same_command_resumes(tmp_path, alone):
    program = tmp_path / "program.py"
    program.write_text(
        "from advnorm.studies import STUDIES\n"
        "from advnorm.studies.launch import launch\n"
        "from advnorm.studies.task import list_tasks\n"
        "if __name__ == '__main__':\n"
        "    tasks = list_tasks(STUDIES.get('A/table1'), protocol='smoke', out='.', device='cpu')\n"
        "    assert [outcome.error for outcome in launch(tasks)] == [None, None]\n"
    )
    command = [sys.executable, str(program)]
    parent = subprocess.Popen(command, cwd=tmp_path)

    def kill(pid):
        parent.kill()
        parent.wait()
        os.kill(pid, signal.SIGCONT)

    with a_death_in_training(tmp_path, kill) as killed:
        parent.wait()
        while not killed:
            time.sleep(0.01)
        until = time.monotonic() + 30
        while holder(killed[0] / ".lock") is not None and time.monotonic() < until:
            time.sleep(0.1)
        assert holder(killed[0] / ".lock") is None
    assert not todo(tmp_path)[0].record_path.exists()
    subprocess.run(command, cwd=tmp_path, check=True)
    assert read_json(todo(tmp_path)[0].record_path)["values"] == alone[0]["values"]


class Scripted:
    """A pool in this process: results by cell, one per try."""

    def __init__(self, results, room=2):
        self.results, self.room = {cell: list(tries) for cell, tries in results.items()}, room
        self.working, self.started = deque(), []

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert not self.working

    def start(self, task):
        assert len(self.working) < self.room
        assert task.run.folder not in [other.run.folder for other in self.working], "two at once in one training"
        self.working.append(task)
        self.started.append(task.cell)

    def wait_for_next(self):
        task = self.working.popleft()
        return TaskResult(task=task, **self.results[task.cell].pop(0))


def named(cells):
    """Tasks of invented cells, given as cell: (training, cell before)."""

    def planned_cell(self):
        training, after = cells[self.cell]
        config, nothing = SimpleNamespace(run_name=training), {"features": None, "feature_images": None, "measures": ()}
        return SimpleNamespace(after=after, config=config, **nothing)

    context = pytest.MonkeyPatch()
    context.setattr(Task, "planned_cell", property(planned_cell))
    context.setattr(Task, "training", property(lambda self: (planned_cell(self).config, None)))
    return context, [Task(study="x", cell=cell, seed=0, protocol="smoke", out=".", device="cpu") for cell in cells]


@pytest.fixture
def scripted(monkeypatch):
    """Launch invented cells with scripted results; return the started cells, the reported and the returned outcomes."""

    def run(cells, results, **options):
        context, made = named(cells)
        with context.context():
            pool = Scripted(results)
            monkeypatch.setattr(launching, "LocalPool", lambda devices: pool)
            monkeypatch.setattr("advnorm.studies.run_tasks.BUSY_SECONDS", 0.0)
            store, reported = SimpleNamespace(state=lambda task: "pending"), []
            try:
                outcomes = launch(made, on_result=reported.append, store=store, **options)
            finally:
                context.undo()
        return pool.started, reported, outcomes

    return run


OK, DIED, WRONG, BUSY = {}, {"error": "died", "retry": True}, {"error": "wrong"}, {"busy": True}


def test_a_failing_task_is_retried_then_reported_once_and_the_others_continue(scripted):
    cells = {"a": ("a", None), "b": ("b", None), "c": ("c", None), "d": ("d", None)}
    results = {"a": [DIED, DIED, DIED], "b": [WRONG], "c": [DIED, OK], "d": [BUSY, OK]}
    started, reported, outcomes = scripted(cells, results, retries=2)
    assert sorted(started) == ["a", "a", "a", "b", "c", "c", "d", "d"]
    assert [outcome.error for outcome in outcomes] == ["died", "wrong", None, None]
    assert sorted(outcome.task.cell for outcome in reported) == ["a", "b", "c", "d"]


def test_tasks_wait_for_tasks_that_share_their_training_or_precede_them(scripted):
    cells = {"after": ("x", "base"), "base": ("y", None), "same": ("y", None), "other": ("z", None)}
    started, reported, outcomes = scripted(cells, {cell: [DIED, OK] for cell in cells}, retries=1)
    assert [cell for cell in started if cell != "other"] == ["base", "base", "same", "same", "after", "after"]
    assert [outcome.task.cell for outcome in outcomes] == list(cells)
    assert [outcome.error for outcome in reported] == [None] * 4


@given(st.data(), st.integers(1, 8))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_chains_group_related_tasks_with_prerequisites_first(data, number):
    cells = {}
    for index in data.draw(st.permutations(range(number))):
        after = data.draw(st.none() | st.integers(0, index - 1)) if index else None
        training = data.draw(st.integers(0, number)) if after is None else f"own{index}"
        cells[str(index)] = (str(training), None if after is None else str(after))
    context, made = named(cells)
    with context.context():
        found = group_into_chains(made + made)
        context.undo()
    assert sorted(task.cell for chain in found for task in chain) == sorted(cells)
    place = {task.cell: (which, position) for which, chain in enumerate(found) for position, task in enumerate(chain)}
    for cell, (training, after) in cells.items():
        if after is not None:
            assert place[after][0] == place[cell][0] and place[after][1] < place[cell][1]
        for other, (its, _) in cells.items():
            assert its != training or place[other][0] == place[cell][0]

    def related(one, other):
        return cells[one][0] == cells[other][0] or cells[one][1] == other or cells[other][1] == one

    for chain in found:  # and nothing is kept waiting for what it has nothing to do with
        family = {chain[0].cell}
        while more := {other for other in cells for one in family if related(one, other)} - family:
            family |= more
        assert family == {task.cell for task in chain}


def test_a_task_starts_when_another_process_releases_its_run(tmp_path, monkeypatch):
    monkeypatch.setattr("advnorm.studies.run_tasks.BUSY_SECONDS", 0.05)
    task = todo(tmp_path)[0]
    task.run.folder.mkdir(parents=True)
    pool, outcomes = Scripted({task.cell: [OK]}), []
    with exclusive(task.run.folder):
        thread = threading.Thread(target=lambda: outcomes.extend(run_tasks([task], pool=pool)))
        thread.start()
        time.sleep(0.3)
        assert not pool.started
    thread.join()
    assert pool.started == [task.cell] and outcomes == [TaskResult(task=task)]


def test_all_wrong_settings_are_reported_at_once(tmp_path, monkeypatch):
    made = todo(tmp_path)
    with pytest.raises(ConfigError) as error:
        launch(made, devices=["cpu", "gpu", "cuda:99"], processes=0, address="auto")
    assert [(problem.code, problem.field) for problem in error.value.problems] == [
        ("out_of_range", "processes"),
        ("conflict", "address"),
        ("no_device", "device"),
        ("no_device", "device"),
    ]
    with raises_problem("unknown_name", "launcher"):
        launch(made, launcher="rays")
    with raises_problem("conflict", "devices"):
        launch(made, launcher="ray", devices=["cpu"])
    monkeypatch.setitem(sys.modules, "ray", None)
    with raises_problem("not_installed", "launcher"):
        launch(made, launcher="ray")
    assert not list(tmp_path.iterdir())


def test_no_tasks_start_no_process():
    assert launch([]) == []
