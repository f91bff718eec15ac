"""Pictures of feature data sets, their files, and the commands of the documentation."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import advnorm
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES
from advnorm.cli.app import app
from advnorm.data import add_split, load
from support.problems import raises_problem


def features(target, **options):
    return ANALYSES.get("features").run(target, **options)


def test_pictures_show_the_images_and_how_well_the_recipe_worked(digits, tmp_path):
    target = digits.target("dual_bn")
    with raises_problem("missing_route", "route"):
        features(target)
    with raises_problem("out_of_range", "examples"):
        features(digits.target("bn"), examples=0)
    with raises_problem("missing_option", "data_dir"):
        features(digits.target("bn"), recipe="D_conflict")
    found = ANALYSES.get("features").run(target, recipe="D_R", steps=15, route="adv", examples=6)
    assert found.feature_distance["after"] < 0.5 * found.feature_distance["before"]
    figure = found.figure()
    assert len(figure.axes) == 18
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_ylabel()]
    assert labels == ["features of", "start", "made (D_R)"]
    assert figure.axes[12].get_xlabel() == f"label {digits.y[0]}"
    paths = found.save(tmp_path / "features")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and all(path.stat().st_size for path in paths)
    assert read_json(paths[0]) == json.loads(json.dumps(with_digest(found.record())))
    assert len(features(digits.target("bn"), recipe="D_det", steps=2, examples=4).figure().axes) == 8


def test_the_title_of_a_run_with_a_long_name_fits(digits, apart):
    target = digits.target("bn", name="cifar10-preact_resnet18-dual_bn-hybrid-eps16_255-fb58506a-seed0")
    figure = features(target, steps=1, examples=4).figure()
    apart(figure, [figure._suptitle])


@pytest.mark.parametrize("recipe", ["D_det", "D_rand"])
def test_targets_are_classes_of_the_model_also_if_few_images_show_them(digits, recipe):
    few = digits.y <= 3
    target = digits.target("bn", images=digits.x[few], labels=digits.y[few])
    found = features(target, recipe=recipe, steps=1, examples=40)
    assert found.labels.max() > 3
    if recipe == "D_det":
        assert torch.equal(found.labels, found.starts + 1)


def test_the_files_of_a_run_are_made_from_its_training_images(digits, tmp_path):
    config = advnorm.Config(objective="standard", epochs=1, batch_size=256, model={"name": "small_cnn"})
    run = advnorm.train(config, out=tmp_path / "runs")
    target = digits.target("bn", model=run.model("last"), folder=run.folder)
    out = tmp_path / "D_det"
    found = features(target, recipe="D_det", steps=1, out=str(out), examples=4)
    made, train = load("features", "train", out), load("digits", "train")
    assert torch.equal(made.labels, (train.labels + 1) % 10)
    assert found.record()["folder"] == str(out)
    with raises_problem("not_supported", "target"):
        features(digits.target("bn"), recipe="D_det", out=str(out))
    with raises_problem("out_of_range", "part"):
        features(target, recipe="D_det", steps=1, out=str(tmp_path / "none"), part=(0,))
    with raises_problem("unknown_name", "layer"):
        features(target, recipe="D_det", steps=1, out=str(tmp_path / "none"), layer="foo")
    with raises_problem("conflict", "data_dir"):
        features(target, recipe="D_det", steps=1, data_dir="foo")
    assert not (tmp_path / "none").exists()


def test_the_ordinary_test_images_are_added_to_the_files_of_a_run(digits, tmp_path):
    config = advnorm.Config(objective="standard", epochs=1, batch_size=256, model={"name": "small_cnn"})
    run = advnorm.train(config, out=tmp_path / "runs")
    target = digits.target("bn", model=run.model("last"), folder=run.folder)
    first, second, third = (str(tmp_path / name) for name in ("first", "second", "third"))
    settings = {"steps": 1, "examples": 4, "shard_size": 1000}
    features(target, recipe="D_R", out=first, part=(1, 2), **settings)
    assert not (tmp_path / "first" / "test").exists(), "the first part adds them"
    features(target, recipe="D_R", out=first, part=(0, 2), **settings)
    features(target, recipe="D_conflict", out=second, data_dir=first, **settings)
    test = load("digits", "test")
    for root in (first, second):
        assert load("features", "test", root).fingerprint == test.fingerprint
    add_split(third, test.take(slice(0, 50)))
    features(target, recipe="D_R", out=third, **settings)
    assert len(load("features", "test", third)) == 50, "existing images stay"
    shutil.rmtree(tmp_path / "first" / "test")
    features(target, recipe="D_conflict", out=str(tmp_path / "bare"), data_dir=first, **settings)
    with raises_problem("missing_file", "root"):
        load("features", "test", tmp_path / "bare")


def test_the_commands_of_the_page_work_in_order(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "analyze_features.md").read_text()
    (flow,) = (block for block in re.findall(r"^```console\n(.*?)^```", page, re.M | re.S) if "data=features" in block)
    monkeypatch.chdir(tmp_path)
    for line in flow.splitlines():
        words = shlex.split(line.removeprefix("$ advnorm "))
        result = CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})
        assert result.exit_code == 0, (line, result.output, result.exception)
