"""Measurements on a trained network."""

import json
from dataclasses import replace

import pytest
import torch

from advnorm import Config, ConfigError, train
from advnorm.data import load
from advnorm.evaluation import benchmark as evaluate
from advnorm.studies import STUDIES, Measure
from advnorm.studies.measurement import measure_run
from advnorm.studies.run_tasks import run_tasks
from advnorm.studies.task import Task, list_tasks
from support.problems import raises_problem


def test_settings_in_the_record_of_an_analysis_are_not_values(tmp_path):
    settings = {"objective": "standard", "eps": 0.1, "data": "synthetic", "epochs": 1, "batch_size": 256}
    run = train(Config.from_dict(settings), out=tmp_path, device="cpu")
    task = Task(study="D/table7", cell="vgg16", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    options = {"corruptions": ["fog"], "severities": [1, 2], "limit": 40}
    found = measure_run(run, Measure(name="corruptions", options=options, scale=100), task).values
    names = (
        "clean",
        "mean",
        "adapted_mean",
        *(f"{kind}/fog/{at}" for kind in ("accuracy", "adapted") for at in (0, 1)),
    )
    assert {*found} == {f"networks/run/{name}" for name in names}
    mean, *levels = (found[f"networks/run/{name}"] for name in ("mean", "accuracy/fog/0", "accuracy/fog/1"))
    assert mean == pytest.approx(sum(levels) / 2)
    shift = measure_run(run, Measure(name="ligs", options={"shifts": ["gaussian"], "limit": 40}), task).values
    assert {*shift} == {f"networks/run/shifts/gaussian/{name}" for name in ("mean", "without_gradient")}


def test_an_edited_measurement_is_rejected(tmp_path):
    run = train(Config(objective="standard", data="synthetic", epochs=1, batch_size=256), out=tmp_path, device="cpu")
    task = Task(study="D/table7", cell="vgg16", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    measure = Measure(name="ligs", options={"shifts": ["gaussian"], "limit": 8})
    found = measure_run(run, measure, task)
    assert measure_run(run, measure, task).values == found.values
    (path,) = run.folder.glob("measures/*.json")
    record = json.loads(path.read_text())
    record["networks"]["run"]["shifts"]["gaussian"]["mean"] = 1.0
    path.write_text(json.dumps(record))
    with raises_problem("damaged_file", f"{path}: digest"):
        measure_run(run, measure, task)


def test_a_measurement_along_training_covers_every_snapshot(tmp_path):
    settings = {"epochs": 3, "batch_size": 256, "attack": {"steps": 1}, "held_out": 0.1, "snapshots": [1, 3]}
    run = train(Config.from_dict({"objective": "standard", "eps": 0.1, **settings}), out=tmp_path, device="cpu")
    task = Task(study="A/table6", cell="standard/eps8", seed=0, protocol="smoke", out=str(tmp_path), device="cpu")
    measure = Measure(options={"attacks": {"one": "fgsm"}, "limit": 100}, checkpoint="along")
    found = measure_run(run, measure, task).values
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
        measure_run(run, replace(measure, options={**measure.options, "limit": 50}), task)


def test_progress_includes_measurements(tmp_path, capsys, monkeypatch):
    shown = []

    def benchmark(*arguments, progress, **others):
        shown.append(progress)
        return evaluate(*arguments, progress=progress, **others)

    monkeypatch.setattr("advnorm.studies.measurement.benchmark", benchmark)
    (one,) = list_tasks(STUDIES.get("A/table6"), cell="standard/eps8", protocol="smoke", out=tmp_path, device="cpu")
    assert [outcome.error for outcome in run_tasks([one], progress=True)] == [None]
    out, _ = capsys.readouterr()
    images = one.planned_cell.measures[0].options["limit"]
    *_, epoch, measuring = out.splitlines()
    assert epoch.startswith("epoch")
    assert measuring == f"standard/eps8: benchmark (noise-uniform, pgd2) on {images} images"
    assert [outcome.error for outcome in run_tasks([one], progress=True)] == [None]  # nothing is left to measure
    assert capsys.readouterr().out == "" and shown == [True]
