"""Running a study: nothing is done twice, nothing is lost, and bad records are told."""

import json
import shutil
import threading
import time
from dataclasses import asdict, replace

import pytest
import torch
from PIL import Image

from advnorm import Config, ConfigError, train
from advnorm._core.locks import exclusive
from advnorm._core.records import write_json
from advnorm.data import load
from advnorm.evaluation import benchmark as evaluate
from advnorm.studies import STUDIES, find, get, list_studies
from advnorm.studies.base import Measure, mean, same_as
from advnorm.studies.record import FORMAT
from advnorm.studies.run import Outcome, Stopped, Task, attempt, blocked, measured, run_all, tasks, work
from advnorm.studies.summary import collected, summary


@pytest.fixture(scope="module")
def smoked(tmp_path_factory):
    """Table 8 of paper A as a smoke test, in a folder."""
    out = tmp_path_factory.mktemp("study")
    outcomes = run_all(tasks(STUDIES.get("A/table8"), protocol="smoke", out=out))
    assert [outcome.error for outcome in outcomes] == [None] * 3
    return out


def test_a_study_gives_a_record_per_cell_with_values_for_every_printed_number(smoked):
    study = STUDIES.get("A/table8")
    values, problems = collected(study, protocol="smoke", out=smoked)
    assert not problems
    for number in study.numbers():
        assert 0 <= mean(values, number.cell, number.value) <= 100
    assert study.answer(values) in ("confirmed", "not confirmed")
    assert study.answer({}) == "not run"


def test_a_finished_cell_is_not_done_again(smoked):
    task = tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[0]
    assert task.state == "done"
    before = task.record.stat().st_mtime_ns
    assert work(task)["values"] == json.loads(task.record.read_text())["values"]
    assert task.record.stat().st_mtime_ns == before


def test_two_processes_share_a_study_and_each_waits_for_what_the_other_has(tmp_path, monkeypatch):
    monkeypatch.setattr("advnorm.studies.run.BUSY_SECONDS", 0.05)
    first, second = tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[:2]
    first.run.folder.mkdir(parents=True)
    told, outcomes = [], []
    with exclusive(first.run.folder):
        thread = threading.Thread(
            target=lambda: outcomes.extend(run_all([first, second], on_outcome=lambda one: told.append(one.task)))
        )
        thread.start()
        while not told:
            time.sleep(0.02)
        assert told == [second] and first.state == "started"
    thread.join()
    assert told == [second, first] and [outcome.error for outcome in outcomes] == [None, None]


@pytest.mark.parametrize("seed", [-1, 2**31])
def test_a_seed_that_no_training_takes_is_refused_before_anything(seed, tmp_path):
    with pytest.raises(ConfigError, match="seed must lie in"):
        tasks(STUDIES.get("A/table8"), seeds=(0, seed), protocol="smoke", out=tmp_path)


def table1(out):
    """The cell of table 1 that table 8 has too."""
    [task] = [t for t in tasks(STUDIES.get("A/table1"), protocol="smoke", out=out) if t.cell == "dual_bn/eps16"]
    return task


def test_a_record_stands_for_the_same_cell_of_another_study(smoked, tmp_path):
    records = tmp_path / "records"
    shutil.copytree(smoked / "records", records)  # and no runs
    task, other = table1(tmp_path), tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[2]
    assert task.state == "done" and task.same == other
    assert work(task)["values"] == json.loads(other.record.read_text())["values"]
    assert not task.record.exists() and not (tmp_path / "runs").exists()
    study = STUDIES.get("A/table1")
    values, problems = collected(study, protocol="smoke", out=tmp_path)
    assert not problems and {cell for cell, _ in values} == {"dual_bn/eps16"}
    [told] = [told for told in summary(tmp_path)["studies"] if told["name"] == "A/table1"]
    assert [cell["seeds"] for cell in told["results"][0]["cells"]] == [[], [0]]


@pytest.mark.parametrize("change", ["settings", "measurements", "damage"])
def test_a_record_made_otherwise_stands_for_no_other_cell(smoked, tmp_path, change):
    shutil.copytree(smoked / "records", tmp_path / "records")
    path = tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path)[2].record
    record = json.loads(path.read_text())
    if change == "settings":
        record["run"]["config"]["lr"] = 7.0
    if change == "measurements":
        record["measures"][0]["options"]["limit"] = 5
    path.write_text("{" if change == "damage" else json.dumps(record))
    assert table1(tmp_path).state == "to do" and table1(tmp_path).same is None
    assert not collected(STUDIES.get("A/table1"), protocol="smoke", out=tmp_path)[0]


def test_a_training_that_two_studies_share_is_done_once(smoked, tmp_path):
    shutil.copytree(smoked / "runs", tmp_path / "runs")  # and no records
    shared = table1(tmp_path)
    assert shared.state == "started" and shared.run.finished
    timing = (shared.run.folder / "timing.jsonl").read_text()
    other = json.loads(tasks(STUDIES.get("A/table8"), protocol="smoke", out=smoked)[2].record.read_text())
    assert work(shared)["values"] == other["values"]
    assert (shared.run.folder / "timing.jsonl").read_text() == timing


def test_a_cell_that_others_start_from_is_trained_though_its_numbers_are_known(tmp_path):
    alike = {
        (task, place)
        for name in STUDIES.names()
        for task in tasks(STUDIES.get(name), protocol="smoke", out=tmp_path)
        for place in same_as(task.study, task.cell)
        if any(task.cell in task.of(cell).needs for cell in STUDIES.get(name).by_name())
    }
    assert alike  # else nothing is tested
    task, (study, cell) = min(alike, key=str)
    other = replace(task, study=study, cell=cell)
    planned = other.found()
    record = {"format": FORMAT, "study": study, "cell": cell, "protocol": "smoke", "seed": 0, "values": {"a": 1.0}}
    run = {"config": planned.config.to_dict(), "seconds": 1.0, "processes": 1}
    write_json(other.record, record | {"run": run, "measures": [asdict(measure) for measure in planned.measures]})
    assert other.state == "done" and task.same is None and task.state == "to do"


def test_a_damaged_or_foreign_record_is_told_and_skipped(smoked, tmp_path):
    study = STUDIES.get("A/table8")
    good = tasks(study, protocol="smoke", out=smoked)[2].record
    folder = tmp_path / "records" / study.name / "dual_bn" / "eps16"
    folder.mkdir(parents=True)
    (folder / "smoke-seed0.json").write_text(good.read_text())
    (folder / "smoke-seed1.json").write_text("{")
    (folder / "smoke-seed2.json").write_text('{"format": "other"}')
    (folder / "smoke-seed3.json").write_text(json.dumps({"format": "advnorm.cell/1", "seed": 3, "values": [1]}))
    values, problems = collected(study, protocol="smoke", out=tmp_path)
    assert len(values["dual_bn/eps16", "adv/clean"]) == 1
    assert [name in " ".join(problems) for name in ("seed1", "seed2", "seed3", "seed0")] == [True, True, True, False]


@pytest.mark.parametrize("text", ["{", "{}", '{"format": "advnorm.cell/2"}'])
def test_a_file_in_the_place_of_a_record_is_told_not_written_over_and_does_not_count_as_done(tmp_path, text):
    first, second = tasks(STUDIES.get("A/table6"), protocol="smoke", out=tmp_path, device="cpu")
    first.record.parent.mkdir(parents=True)
    first.record.write_text(text)
    assert [task.state for task in (first, second)] == ["damaged", "to do"]
    outcomes = run_all([first, second])
    assert str(first.record) in outcomes[0].error and "once it is gone" in outcomes[0].error
    assert first.record.read_text() == text
    assert outcomes[1].error is None and second.state == "done"
    first.record.unlink()
    assert attempt(first, retries=0).error is None and first.state == "done"


def test_a_training_that_is_told_to_stop_is_not_tried_again_and_ends_the_study(tmp_path, monkeypatch):
    import advnorm.studies.run as module

    begun = []

    def stopped(config, **settings):  # as by SIGTERM, at once
        begun.append(config.norm)
        return train(config, **settings, max_minutes=1e-9)

    todo = tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path, device="cpu")
    monkeypatch.setattr(module, "train", stopped)
    with pytest.raises(Stopped, match="single/eps16 was stopped before its end; the same command goes on"):
        run_all(todo, retries=3)
    assert begun == ["bn"]
    monkeypatch.undo()
    assert [outcome.error for outcome in run_all(todo)] == [None] * 3


def test_a_seed_that_is_named_twice_is_one(tmp_path):
    study = STUDIES.get("A/table6")
    assert tasks(study, seeds=(1, 0, 1), out=tmp_path) == tasks(study, seeds=(1, 0), out=tmp_path)


def test_a_cell_whose_start_has_a_record_and_no_run_any_more_says_what_to_delete(tmp_path):
    todo = tasks(STUDIES.get("E/sec4.4"), cell="clean_to_adv", protocol="smoke", out=tmp_path, device="cpu")
    assert [outcome.error for outcome in run_all(todo)] == [None] * 2
    shutil.rmtree(tmp_path / "runs")
    todo[1].record.unlink()
    assert f"its run is gone; delete {todo[0].record}" in attempt(todo[1], retries=0).error
    todo[0].record.unlink()
    assert [outcome.error for outcome in run_all(todo)] == [None] * 2


def test_a_failed_cell_is_tried_again_and_then_told_and_the_others_go_on(tmp_path, monkeypatch):
    import advnorm.studies.run as module

    tried = []

    def fails(task, *, progress):
        tried.append(task.cell)
        if task.cell.startswith("dual"):
            raise OSError("no space")

    monkeypatch.setattr(module, "work", fails)
    outcomes = run_all(tasks(STUDIES.get("A/table8"), protocol="smoke", out=tmp_path), retries=2)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False]
    assert tried == ["single/eps16", "single_kl/eps16", *["dual_bn/eps16"] * 3]
    assert "no space" in outcomes[2].error


def test_a_wrong_configuration_is_not_tried_again(tmp_path):
    task = replace(tasks(STUDIES.get("A/table8"), protocol="paper", out=tmp_path)[0], data_dir=str(tmp_path / "no"))
    outcome = attempt(task, retries=5)
    assert isinstance(outcome, Outcome) and "missing" in outcome.error
    assert not (tmp_path / "runs").exists()


def test_names_lead_to_studies_and_cells():
    assert "A/table3" in list_studies("A/*")
    assert get("A/table3/dual_bn/eps16").norm == "dual_bn"
    assert find("A/table3")[1] is None
    with pytest.raises(ConfigError, match="did you mean 'dual_bn/eps16'"):
        get("A/table3/dual_bn/eps61")
    with pytest.raises(ConfigError, match="did you mean 'A/table3'"):
        find("A/tabel3")
    with pytest.raises(ConfigError, match="name one: "):
        get("A/table3")
    with pytest.raises(ConfigError, match="A/fig1 has nothing to run: Scheme of Cross-AT.*A drawing, nothing measured"):
        find("A/fig1")


def test_images_that_some_cells_lack_stop_none_of_the_others(tmp_path):
    found = tasks(STUDIES.get("C/table1"), protocol="fast", out=tmp_path / "out", data_dir=tmp_path)
    assert [problem.split(":")[0] for problem in blocked(found)] == [
        f"CIFAR-10 is not at {tmp_path}",
        f"imagenette is not at {tmp_path}",
    ]
    for name in range(10):
        assert blocked(found) != []  # of other classes it is another set
        folder = tmp_path / "imagenette2" / "train" / f"n{name}"
        folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(folder / "one.png")
    assert blocked(found) == []
    assert blocked(task for task in found if task.cell.startswith("cifar10")) != []
    assert blocked([]) == [] and not (tmp_path / "out").exists()


def test_progress_shows_the_measuring_too(tmp_path, capsys, monkeypatch):
    shown = []

    def benchmark(*arguments, progress, **others):
        shown.append(progress)
        return evaluate(*arguments, progress=progress, **others)

    monkeypatch.setattr("advnorm.studies.run.benchmark", benchmark)
    (one,) = tasks(STUDIES.get("A/table6"), cell="standard/eps8", protocol="smoke", out=tmp_path, device="cpu")
    assert [outcome.error for outcome in run_all([one], progress=True)] == [None]
    out, _ = capsys.readouterr()
    images = one.found().measures[0].options["limit"]
    *_, epoch, measuring = out.splitlines()
    assert epoch.startswith("epoch")
    assert measuring == f"standard/eps8: benchmark (noise-uniform, pgd2) on {images} images"
    assert [outcome.error for outcome in run_all([one], progress=True)] == [None]  # nothing is left to measure
    assert capsys.readouterr().out == "" and shown == [True]


def test_settings_in_the_record_of_an_analysis_are_no_measurements(tmp_path):
    settings = {"objective": "standard", "eps": 0.1, "data": "synthetic", "epochs": 1, "batch_size": 256}
    run = train(Config.from_dict(settings), out=tmp_path, device="cpu")
    task = Task(study="D/table7", cell="vgg16", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    options = {"corruptions": ["fog"], "severities": [1, 2], "limit": 40}
    found = measured(run, Measure(name="corruptions", options=options, scale=100), task)
    names = (
        "clean",
        "mean",
        "adapted_mean",
        *(f"{kind}/fog/{at}" for kind in ("accuracy", "adapted") for at in (0, 1)),
    )
    assert {*found} == {f"networks/run/{name}" for name in names}
    mean, *levels = (found[f"networks/run/{name}"] for name in ("mean", "accuracy/fog/0", "accuracy/fog/1"))
    assert mean == pytest.approx(sum(levels) / 2)
    shift = measured(run, Measure(name="ligs", options={"shifts": ["gaussian"], "limit": 40}), task)
    assert {*shift} == {f"networks/run/shifts/gaussian/{name}" for name in ("mean", "without_gradient")}


def test_a_measurement_along_training_is_that_of_every_snapshot(tmp_path):
    settings = {"epochs": 3, "batch_size": 256, "attack": {"steps": 1}, "held_out": 0.1, "snapshots": [1, 3]}
    run = train(Config.from_dict({"objective": "standard", "eps": 0.1, **settings}), out=tmp_path, device="cpu")
    task = Task(study="A/table6", cell="standard/eps8", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    measure = Measure(options={"attacks": {"one": "fgsm"}, "limit": 100}, checkpoint="along")
    found = measured(run, measure, task)
    assert {*found} == {f"{epoch}/shared/{name}" for epoch in (1, 3) for name in ("clean", "one")}
    data = load("digits", "test")
    chosen = torch.arange(100) * len(data) // 100
    for epoch in (1, 3):
        with torch.no_grad():
            right = run.model(f"epoch{epoch}")(data.pixels(chosen)).argmax(1) == data.labels[chosen]
        assert found[f"{epoch}/shared/clean"] == pytest.approx(100 * right.double().mean().item())
    assert found["1/shared/clean"] != found["3/shared/clean"]
    (run.checkpoints / "epoch1.json").unlink()
    with pytest.raises(ConfigError, match="no checkpoint 'epoch1'"):  # and no number is left out in silence
        measured(run, replace(measure, options={**measure.options, "limit": 50}), task)
