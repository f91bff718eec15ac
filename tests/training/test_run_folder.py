"""The folder of a run: checkpoints, models, weights and the record."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from typer.testing import CliRunner

import advnorm
from advnorm import ConfigError
from advnorm.cli.app import app
from advnorm.data import load
from advnorm.models.weights import save_weights
from advnorm.training import checkpoint, entry_point
from advnorm.training.build import build_model, data_properties
from advnorm.training.optimizer import norm_parameters
from support.problems import raises_problem
from support.small_runs import arguments, small, tensors, train


def test_best_and_last_are_the_models_of_their_epochs(tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, 0.7])
    score = lambda *_: {"clean": 0.1, "pgd1": 0.1, "score": next(scores)}  # noqa: E731
    monkeypatch.setattr("advnorm.training.validation.Validation.__call__", score)
    run = train(small(norm="dual_bn", ema=0.5), tmp_path)
    assert run.record["best"]["epoch"] == 2 and run.record["last"]["epoch"] == 3
    best, last = run.model("best").state_dict(), run.model("last").state_dict()
    assert not torch.equal(best["fc.weight"], last["fc.weight"])
    assert all(torch.equal(best[name], value) for name, value in run.model().state_dict().items())
    kept = tensors(run, "best")
    for name in dict(run.model().named_parameters()):
        assert torch.equal(best[name], kept[f"ema.{name}"]) and not torch.equal(best[name], kept[f"model.{name}"])
    assert not run.model().training


def test_of_equal_scores_the_first_is_the_best(tmp_path, monkeypatch):
    scores = iter([0.5, 0.9, 0.9])
    score = lambda *_: {"clean": 0.1, "pgd1": 0.1, "score": next(scores)}  # noqa: E731
    monkeypatch.setattr("advnorm.training.validation.Validation.__call__", score)
    run = train(small(), tmp_path)
    assert run.record["best"]["epoch"] == 2 and checkpoint.load(run.checkpoints, "best")[1]["step"] == 8


@pytest.mark.parametrize("ema", [None, 0.5])
def test_snapshots_are_the_models_after_their_epochs(tmp_path, ema):
    whole = train(small(norm="dual_bn", ema=ema, snapshots=(1, 3)), tmp_path / "whole")
    assert whole.snapshots == {1: "epoch1", 3: "epoch3"}
    short = train(small(norm="dual_bn", ema=ema, schedule="constant", epochs=1), tmp_path / "short")
    long = train(small(norm="dual_bn", ema=ema, schedule="constant", snapshots=(1,)), tmp_path / "long")
    for one, other in ((whole.model("epoch3"), whole.model("last")), (long.model("epoch1"), short.model("last"))):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert not torch.equal(whole.model("epoch1").fc.weight, whole.model("epoch3").fc.weight)
    with raises_problem("unknown_name", "name"):
        whole.model("epoch2")
    twice = train(small(norm="dual_bn", epochs=2, budget=2, snapshots=(1, 2)), tmp_path / "twice")
    assert list(twice.snapshots) == [2, 4]


def test_checkpoints_within_the_next_epoch_leave_a_snapshot_alone(tmp_path):
    config = small(objective="standard", snapshots=(1, 2), validate_every=0)
    often = train(config, tmp_path / "often", checkpoint_minutes=0)
    rarely = train(config, tmp_path / "rarely")
    for name, step in (("epoch1", 4), ("epoch2", 8)):
        assert checkpoint.load(often.checkpoints, name)[1]["step"] == step
        one, other = (tensors(run, name) for run in (often, rarely))
        assert all(torch.equal(value, other[key]) for key, value in one.items())


def test_a_run_that_died_before_its_snapshot_was_kept_keeps_it_then(tmp_path, monkeypatch):
    config, save = small(snapshots=(1, 3)), checkpoint.save

    def dies(folder, name, *more):
        if name == "epoch1":
            raise KeyboardInterrupt
        return save(folder, name, *more)

    monkeypatch.setattr(checkpoint, "save", dies)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "died")
    monkeypatch.setattr(checkpoint, "save", save)
    died, whole = train(config, tmp_path / "died"), train(config, tmp_path / "whole")
    for which in ("epoch1", "epoch3", "last"):
        one, other = (run.model(which).state_dict() for run in (died, whole))
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_weights_come_from_a_run_or_a_file_and_must_fit(tmp_path):
    start = train(small(norm="dual_bn", epochs=1), tmp_path)
    file = save_weights(tmp_path / "w.safetensors", start.model(), {})
    tuned = [
        train(small(norm="dual_bn", epochs=1, train_only="norms", weights=str(weights)), tmp_path)
        for weights in (start.folder, file)
    ]
    assert tuned[0].metrics() == tuned[1].metrics()
    assert tuned[0].record["weights_fingerprint"] == tuned[1].record["weights_fingerprint"]
    assert "weights_fingerprint" not in start.record
    before, model = start.model("last"), tuned[0].model("last")
    norms = set(norm_parameters(model))
    for (name, old), (_, new) in zip(before.named_parameters(), model.named_parameters()):
        assert torch.equal(old, new) != (new in norms), name
    with raises_problem("wrong_tensors", "weights"):
        train(
            small(norm="dual_bn", epochs=1, weights=str(train(small(norm="ln", epochs=1), tmp_path).folder)), tmp_path
        )
    other = train(small(norm="dual_bn", epochs=1, weights=str(train(small(epochs=1), tmp_path).folder)), tmp_path)
    assert "filled the banks clean, adv" in (other.folder / "log.txt").read_text()
    file.unlink()
    assert train(tuned[1].config, tmp_path).finished, "a finished run needs its start no more"


def test_a_resumed_run_does_not_need_its_initial_weights(tmp_path):
    file = save_weights(tmp_path / "w.safetensors", train(small(epochs=1), tmp_path).model("last"), {})
    config = small(epochs=1, weights=str(file))
    assert not train(config, tmp_path, max_minutes=0).finished
    file.unlink()
    assert train(config, tmp_path).finished


def test_other_initial_weights_of_the_same_name_are_rejected(tmp_path):
    model = build_model(small(), data_properties(load("synthetic", "train", **small().data.options)))
    file = save_weights(tmp_path / "w.safetensors", model, {})
    config = small(epochs=1, weights=str(file))
    run = train(config, tmp_path, max_minutes=0)
    (run.checkpoints / "last.json").unlink()
    next(model.parameters()).data += 1
    save_weights(file, model, {})
    with raises_problem("already_exists", "weights"):
        train(config, tmp_path)


def test_a_head_per_domain_trains_end_to_end(tmp_path):
    run = train(small(norm="dual_bn", dual_head=True, epochs=1), tmp_path)
    model = run.model()
    heads = {name: value for name, value in model.state_dict().items() if re.search(r"weight_(clean|adv)$", name)}
    assert any(value.dim() == 2 for value in heads.values())
    assert "held_out" in run.record["best"]
    assert advnorm.strip(model, route="adv")(torch.rand(2, 1, 8, 8)).shape == (2, 4)


def test_a_finished_run_is_not_trained_again(tmp_path, monkeypatch):
    run = train(small(epochs=1), tmp_path)
    monkeypatch.setattr(entry_point, "TrainingLoop", None)
    assert train(small(epochs=1), tmp_path).metrics() == run.metrics()


def test_a_finished_run_is_read_though_its_checkpoints_are_gone(tmp_path):
    arguments(tmp_path)
    run = train(small(name="small"), tmp_path / "runs")
    shutil.rmtree(run.checkpoints)
    again = CliRunner().invoke(app, arguments(tmp_path))
    assert again.exit_code == 0 and "last: epoch 3" in again.output
    with raises_problem("unknown_name", "name"):
        run.model()


def test_a_run_of_another_version_is_rejected_with_folder_and_version(tmp_path):
    run = train(small(epochs=1), tmp_path)
    path = run.folder / "run.json"
    content = json.loads(path.read_text())
    assert content["advnorm"] == advnorm.__version__
    for change, message in (
        ({"format": "advnorm.run/9", "advnorm": "9.0"}, r"written by advnorm 9\.0, must .* got 'advnorm\.run/9'"),
        ({"config": {**content["config"], "future": 1}, "advnorm": "9.0"}, r"advnorm 9\.0, which .*'future'"),
    ):
        path.write_text(json.dumps({**content, **change}))
        for act in (lambda: train(small(epochs=1), tmp_path), run.model):
            with pytest.raises(ConfigError, match=message) as raised:
                act()
            assert str(run.folder) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("spoil", ["last.json", "the tensors"])
def test_a_damaged_checkpoint_is_an_error_that_says_how_to_start_again(tmp_path, spoil):
    run = train(small(epochs=1), tmp_path, max_minutes=0)
    path = run.checkpoints / spoil if spoil == "last.json" else next(run.checkpoints.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match=f"damaged.*delete {run.folder} to start the run from the beginning"):
        train(small(epochs=1), tmp_path)


def test_the_configuration_in_a_run_trains_the_same_run(tmp_path):
    run = train(small(norm="dual_bn", epochs=1, eps="8/255"), tmp_path)
    again = train(advnorm.load_config(run.folder / "config.yaml"), tmp_path)
    assert again.folder == run.folder
    elsewhere = train(advnorm.load_config(run.folder / "config.yaml"), tmp_path / "elsewhere")
    assert elsewhere.metrics() == run.metrics()


def test_an_edited_record_is_rejected(tmp_path):
    run = train(small(epochs=1), tmp_path)
    path = run.folder / "record.json"
    record = json.loads(path.read_text())
    record["last"]["held_out"]["clean"] = 1.0
    path.write_text(json.dumps(record))
    with raises_problem("damaged_file", f"{path}: digest"):
        _ = advnorm.Run.open(run.folder).record
    del record["digest"]
    path.write_text(json.dumps(record))
    with raises_problem("damaged_file", f"{path}: digest"):
        _ = advnorm.Run.open(run.folder).record


@pytest.mark.parametrize("text", ["1e999", "-4", "4000000000"])
def test_a_number_that_cannot_be_is_reported_with_its_file(tmp_path, text):
    run = train(small(epochs=1), tmp_path)
    path = run.folder / "run.json"
    path.write_text(path.read_text().replace('"num_classes": 4', f'"num_classes": {text}'))
    with raises_problem("damaged_file") as caught:
        run.model()
    (problem,) = caught.value.problems
    assert problem.field in (str(path), f"{path}: data.num_classes") and problem.hint


def test_metrics_that_cannot_be_read_have_a_fix(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with raises_problem("missing_file") as caught:
        advnorm.Run(tmp_path).metrics()
    assert caught.value.problems[0].hint


def test_a_folder_that_cannot_be_named_is_an_error():
    with raises_problem("not_writable", "out"):
        train(small(), "a\0b")


def test_the_record_has_all_conditions(tmp_path):
    run = train(small(norm="cross_bn", epochs=3), tmp_path)
    record = run.record
    assert record["config"] == run.config.to_dict() and record["data"]["fingerprint"]
    assert record["layout"] == "concatenated" and record["attack"].startswith("PGD(threat=ThreatModel(norm='Linf'")
    assert record["routing"] == [
        {
            "norm": "cross_bn",
            "layers": 3,
            "domains": {
                "clean": {"normalized_by": "adv", "feed": "clean", "scaled_by": "clean"},
                "adv": {"normalized_by": "clean", "feed": "adv", "scaled_by": "adv"},
            },
        }
    ]
    assert {"torch", "device", "commit", "advnorm", "threads", "peak_memory"} <= set(record)
    assert record["validation_attack"].startswith("PGD(") and "steps=1," in record["validation_attack"]
    assert record["device_id"] is None, "a CPU is not identified"
    assert record["processes"] == 1 and record["steps"] == 12 and record["precision"] == "float32"
    assert record["seconds"] > record["first_step_seconds"] > 0 and record["images_per_second"] > 0
    assert record["last"] == run.metrics()[-1] and record["best"] in run.metrics()
    timing = [json.loads(row) for row in (run.folder / "timing.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in timing] == [1, 2, 3] and all(row["steps"] == 4 for row in timing)
    assert sum(row["seconds"] for row in timing) == pytest.approx(record["seconds"])
    log = (run.folder / "log.txt").read_text()
    assert "cross_bn in 3 layers: adv images: normalized by clean, update adv, scaled by adv" in log
    assert "epoch   3  loss " in log and "held out: clean" in log and "finished after" in log
