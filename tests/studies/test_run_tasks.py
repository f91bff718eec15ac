"""Running a study: nothing runs twice, nothing is lost, and damaged records are reported."""

import json
import shutil
import threading
import time
from dataclasses import asdict, replace

import pytest
from PIL import Image

from advnorm import ConfigError, train
from advnorm._core.locks import exclusive
from advnorm._core.records import write_json
from advnorm.evaluation.outcomes import CELL_FORMAT
from advnorm.studies import STUDIES
from advnorm.studies.claims import mean
from advnorm.studies.registry import equivalent_cells
from advnorm.studies.report_data import summarize_studies
from advnorm.studies.run_tasks import TrainingStopped, attempt_task, find_blocking_problems, run_task, run_tasks
from advnorm.studies.store import RecordStore
from advnorm.studies.task import list_tasks
from support.study_records import collect_values, record_of, state_of


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    """Table 8 of paper A as a smoke test, in a folder."""
    out = tmp_path_factory.mktemp("study")
    outcomes = run_tasks(list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=out))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return out


def test_a_study_writes_a_record_per_cell_with_a_value_for_every_printed_number(smoked):
    study = STUDIES.get("A/table8")
    values, problems = collect_values(study, protocol="smoke", out=smoked)
    assert not problems
    for number in study.numbers:
        assert 0 <= mean(values, number.cell, number.value) <= 100
    assert study.verdict(values) in ("supported", "contradicted", "undecided")
    assert study.verdict({}) == "not run"


def test_a_finished_cell_is_not_run_again(smoked):
    task = list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[0]
    assert state_of(task) == "done"
    before = task.record_path.stat().st_mtime_ns
    assert run_task(task)["values"] == json.loads(task.record_path.read_text())["values"]
    assert task.record_path.stat().st_mtime_ns == before


def test_two_processes_share_a_study_and_wait_for_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("advnorm.studies.run_tasks.BUSY_SECONDS", 0.05)
    first, second = list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[:2]
    first.run.folder.mkdir(parents=True)
    reported, outcomes = [], []
    with exclusive(first.run.folder):
        thread = threading.Thread(
            target=lambda: outcomes.extend(run_tasks([first, second], on_result=lambda one: reported.append(one.task)))
        )
        thread.start()
        while not reported:
            time.sleep(0.02)
        assert reported == [second] and state_of(first) == "started"
    thread.join()
    assert reported == [second, first] and [outcome.error for outcome in outcomes] == [None, None]


def test_a_measurement_that_another_process_takes_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr("advnorm.studies.run_tasks.BUSY_SECONDS", 0.05)
    task = list_tasks(STUDIES.get("A/table6"), protocol="smoke", out=tmp_path, device="cpu")[0]
    values, outcomes = run_task(task)["values"], []
    [measured] = (task.run.folder / "measures").glob("*.json")
    measured.unlink()
    task.record_path.unlink()
    with exclusive(measured):
        assert attempt_task(task, RecordStore(tmp_path)).busy
        thread = threading.Thread(target=lambda: outcomes.extend(run_tasks([task], retries=0)))
        thread.start()
        thread.join(1.0)
        assert thread.is_alive() and not measured.exists()
    thread.join()
    assert [outcome.error for outcome in outcomes] == [None] and record_of(task)["values"] == values


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_an_invalid_seed_raises_before_any_work(seed, tmp_path):
    with pytest.raises(ConfigError):
        list_tasks(STUDIES.get("A/table8"), seeds=(0, seed), protocol="smoke", out=tmp_path)


def table1(out):
    """The cell of table 1 that table 8 has too."""
    [task] = [t for t in list_tasks(STUDIES.get("A/table1"), protocol="smoke", out=out) if t.cell == "dual_bn/eps16"]
    return task


def test_a_record_serves_the_same_cell_of_another_study(smoked, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(smoked / "records", records)  # and no runs
    task, other = table1(tmp_path), list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[2]
    assert state_of(task) == "done" and record_of(task)["study"] == other.study
    assert run_task(task)["values"] == json.loads(other.record_path.read_text())["values"]
    assert not task.record_path.exists() and not (tmp_path / "runs").exists()
    study = STUDIES.get("A/table1")
    values, problems = collect_values(study, protocol="smoke", out=tmp_path)
    assert not problems and {cell for cell, _ in values} == {"dual_bn/eps16"}
    [found] = [one for one in summarize_studies(tmp_path)["studies"] if one["name"] == "A/table1"]
    assert [cell["seeds"] for cell in found["results"][0]["cells"]] == [[], [0]]


@pytest.mark.parametrize("change", ["settings", "measurements", "damage"])
def test_a_record_with_other_settings_serves_no_other_cell(smoked, tmp_path, change):
    shutil.copytree(smoked / "records", tmp_path / "records")
    path = list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[2].record_path
    record = json.loads(path.read_text())
    if change == "settings":
        record["run"]["config"]["lr"] = 7.0
    if change == "measurements":
        record["measures"][0]["options"]["limit"] = 5
    path.write_text("{" if change == "damage" else json.dumps(record))
    assert state_of(table1(tmp_path)) == "pending" and record_of(table1(tmp_path)) is None
    assert not collect_values(STUDIES.get("A/table1"), protocol="smoke", out=tmp_path)[0]


def test_a_training_that_two_studies_share_runs_once(smoked, tmp_path):
    shutil.copytree(smoked / "runs", tmp_path / "runs")  # and no records
    shared = table1(tmp_path)
    assert state_of(shared) == "started" and shared.run.finished
    timing = (shared.run.folder / "timing.jsonl").read_text()
    other = json.loads(list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[2].record_path.read_text())
    assert run_task(shared)["values"] == other["values"]
    assert (shared.run.folder / "timing.jsonl").read_text() == timing


def test_a_cell_that_others_start_from_is_trained_even_if_its_numbers_are_known(tmp_path):
    alike = {
        (task, place)
        for name in STUDIES.names()
        for task in list_tasks(STUDIES.get(name), protocol="smoke", out=tmp_path)
        for place in equivalent_cells(task.study, task.cell)
        if any(task.cell in task.sibling(cell).prerequisites for cell in STUDIES.get(name).by_name)
    }
    assert alike  # else nothing is tested
    task, (study, cell) = min(alike, key=str)
    other = replace(task, study=study, cell=cell)
    planned = other.planned_cell
    record = {"format": CELL_FORMAT, "study": study, "cell": cell, "protocol": "smoke", "seed": 0, "values": {"a": 1.0}}
    run = {"config": planned.config.to_dict(), "seconds": 1.0, "processes": 1}
    write_json(other.record_path, record | {"run": run, "measures": [asdict(measure) for measure in planned.measures]})
    assert state_of(other) == "done" and record_of(task) is None and state_of(task) == "pending"


def test_damaged_and_foreign_records_are_skipped_and_reported(smoked, tmp_path):
    study = STUDIES.get("A/table8")
    good = list_tasks(study, protocol="smoke", out=smoked)[2].record_path
    folder = tmp_path / "records" / study.name / "dual_bn" / "eps16"
    folder.mkdir(parents=True)
    (folder / "smoke-seed0.json").write_text(good.read_text())
    (folder / "smoke-seed1.json").write_text("{")
    (folder / "smoke-seed2.json").write_text('{"format": "other"}')
    (folder / "smoke-seed3.json").write_text(json.dumps({"format": "advnorm.cell/1", "seed": 3, "values": [1]}))
    values, problems = collect_values(study, protocol="smoke", out=tmp_path)
    assert len(values["dual_bn/eps16", "adv/clean"]) == 1
    assert [name in " ".join(map(str, problems)) for name in ("seed1", "seed2", "seed3", "seed0")] == [
        True,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "advnorm.cell/2"}'])
def test_a_file_in_the_place_of_a_record_is_reported_and_never_overwritten(tmp_path, text):
    first, second = list_tasks(STUDIES.get("A/table6"), protocol="smoke", out=tmp_path, device="cpu")
    first.record_path.parent.mkdir(parents=True)
    first.record_path.write_text(text)
    assert [state_of(task) for task in (first, second)] == ["damaged", "pending"]
    outcomes = run_tasks([first, second])
    assert str(first.record_path) in outcomes[0].error and "delete" in outcomes[0].error
    assert first.record_path.read_text() == text
    assert outcomes[1].error is None and state_of(second) == "done"
    first.record_path.unlink()
    assert attempt_task(first, RecordStore(tmp_path)).error is None and state_of(first) == "done"


def test_a_stopped_training_is_not_retried_and_ends_the_study(tmp_path, monkeypatch):
    import advnorm.studies.run_tasks as module

    begun = []

    def stopped(config, **settings):  # as by SIGTERM, at once
        begun.append(config.norm)
        return train(config, **settings, max_minutes=1e-9)

    todo = list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path, device="cpu")
    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises(TrainingStopped, match="single/eps16 was stopped before its end"):
        run_tasks(todo, retries=3)
    assert begun == ["bn"]
    monkeypatch.undo()
    assert [outcome.error for outcome in run_tasks(todo)] == [None] * 3


def test_a_duplicate_seed_counts_once(tmp_path):
    study = STUDIES.get("A/table6")
    assert list_tasks(study, seeds=(1, 0, 1), out=tmp_path) == list_tasks(study, seeds=(1, 0), out=tmp_path)


def test_a_prerequisite_with_a_record_but_no_run_names_the_file_to_delete(tmp_path):
    todo = list_tasks(STUDIES.get("E/sec4.4"), cell="clean_to_adv", protocol="smoke", out=tmp_path, device="cpu")
    assert [outcome.error for outcome in run_tasks(todo)] == [None] * 2
    record = todo[1].record_path.read_text()
    assert str(tmp_path) not in record and todo[0].run.folder.name in record, "no path of this computer"
    shutil.rmtree(tmp_path / "runs")
    todo[1].record_path.unlink()
    assert f"its run is gone; delete {todo[0].record_path}" in attempt_task(todo[1], RecordStore(tmp_path)).error
    todo[0].record_path.unlink()
    assert [outcome.error for outcome in run_tasks(todo)] == [None] * 2


def test_a_failed_cell_is_retried_then_reported_and_the_others_continue(tmp_path, monkeypatch):
    import advnorm.studies.run_tasks as module

    tried = []

    def fails(task, store, *, progress):
        tried.append(task.cell)
        if task.cell.startswith("dual"):
            raise OSError("no space")

    monkeypatch.setattr(module, "run_task", fails)
    outcomes = run_tasks(list_tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path), retries=2)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert tried == ["single/eps16", "single_kl/eps16", *["dual_bn/eps16"] * 3]
    assert "no space" in outcomes[2].error


def test_a_wrong_configuration_is_not_retried(tmp_path):
    task = replace(
        list_tasks(STUDIES.get("A/table8"), protocol="paper", out=tmp_path)[0], data_dir=str(tmp_path / "no")
    )
    outcome = attempt_task(task, RecordStore(tmp_path))
    assert "missing" in outcome.error and not outcome.retry
    assert not (tmp_path / "runs").exists()


def test_data_that_some_cells_lack_do_not_block_the_others(tmp_path):
    def blocking(tasks):
        return find_blocking_problems(tasks, RecordStore(tmp_path / "out"))

    found = list_tasks(STUDIES.get("C/table1"), protocol="fast", out=tmp_path / "out", data_dir=tmp_path)
    missing = blocking(found)
    assert len(missing) == 2 and "CIFAR-10" in str(missing[0]) and "imagenette" in str(missing[1])
    for name in range(10):
        folder = tmp_path / "imagenette2" / "train" / f"n{name}"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "one.png")
    assert blocking(found) == []
    assert blocking(task for task in found if task.cell.startswith("cifar10")) != []
    assert blocking([]) == [] and not (tmp_path / "out").exists()
