"""Transfer between models that agree and disagree by construction (paper D, table 3)."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, transfer
from advnorm.analysis.images import predict_classes
from advnorm.analysis.transfer import Transfer
from support.class_readers import Reader, showing
from support.problems import raises_problem


def compare(targets, **options):
    return ANALYSES.get("transfer").run(targets, **options)


def test_the_matrix_is_one_where_models_agree_and_zero_where_they_do_not():
    y = torch.arange(40) % 4
    other = (y + 1) % 4
    models = {"first": Reader(0), "same": Reader(0), "second": Reader(1), "shifted": Reader(0, 1)}
    sets = {
        "first": (showing(y, other), y),
        "both": (showing(y, y), y),
        "second": (showing(other, y), y),
        "half": (showing(torch.where(torch.arange(40) < 20, y, other), other), y),
    }
    found = transfer(models, sets, batch_size=7)
    rows = [tuple(row.values()) for row in found.accuracy.values()]
    assert rows == [(1, 1, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (0.5, 0.5, 0, 0)]
    assert list(found.accuracy) == ["first", "both", "second", "half"] and list(found.accuracy["both"]) == list(models)
    assert found.images == dict.fromkeys(sets, 40)
    assert found.record()["accuracy"]["second"] == {"first": 0, "same": 0, "second": 1, "shifted": 0}


def test_all_problems_are_reported_at_once():
    with raises_problem("empty", "models") as caught:
        transfer({}, {}, routes={"a": "adv"})
    assert [problem.field for problem in caught.value.problems] == ["models", "sets", "routes"]


def test_classes_do_not_depend_on_the_batch_size_and_the_model_stays_unchanged(digits, untouched):
    model = digits.networks["dual_bn"].train()
    with untouched(model):
        found = [predict_classes(model, digits.x, route="adv", batch_size=size) for size in (300, 64)]
    model.eval()
    assert torch.equal(*found)
    with torch.no_grad(), advnorm.route(model, "adv"):
        assert torch.equal(found[0], model(digits.x).argmax(1))


def test_adversarial_examples_fool_their_own_model_most(digits):
    targets = [digits.target("bn"), digits.target("dual_bn")]
    seen = []
    found = compare(targets, source="adversarial", progress=lambda *done: seen.append(done))
    assert list(found.accuracy) == list(found.accuracy["bn"]) == ["bn", "dual_bn (clean)", "dual_bn (adv)"]
    x_adv = targets[0].attack(digits.networks["bn"], digits.x, digits.y)
    with torch.no_grad():
        expected = (digits.networks["bn"](x_adv).argmax(1) == digits.y).double().mean()
    on_bn = {source: row["bn"] for source, row in found.accuracy.items()}
    assert on_bn["bn"] == pytest.approx(float(expected), abs=0.01)
    assert on_bn["bn"] < min(on_bn["dual_bn (clean)"], on_bn["dual_bn (adv)"])
    batches = -(-300 // targets[0].batch_size)
    crafting = [(done, batches) for done in range(1, batches + 1)]
    assert seen == [*crafting * 3, (1, 3), (2, 3), (3, 3)]
    assert found.conditions["runs"]["dual_bn (adv)"]["route"] == "adv"


def test_crafting_with_an_attack_on_batch_statistics_changes_none(digits, untouched):
    target = digits.target("bn")
    updating = dataclasses.replace(target.attack, statistics="batch")
    with untouched(target.model):
        found = compare([dataclasses.replace(target, attack=updating)], source="adversarial")
    assert found.accuracy == compare([target], source="adversarial").accuracy


def test_features_serve_the_model_they_come_from_best(digits):
    targets = [
        digits.target("bn", images=digits.x[:60], labels=digits.y[:60]),
        digits.target("none", images=digits.x[:60], labels=digits.y[:60]),
    ]
    found = compare(targets, steps=25)
    assert found.what == "features" and found.conditions["steps"] == 25
    assert found.accuracy["bn"]["bn"] > 0.7
    assert found.accuracy["bn"]["bn"] >= found.accuracy["none"]["bn"]
    with raises_problem("unknown_name", "source"):
        compare(targets, source="feature")


def test_the_heat_map_has_a_number_in_every_cell(tmp_path):
    found = Transfer(
        accuracy={
            "a": {"a": 0.9, "b": 0.1, "a network of a very long name": 0.333},
            "b": {"a": 0.2, "b": 0.8, "a network of a very long name": 1.0},
        },
        images={"a": 10, "b": 10},
        what="features",
    )
    axes = found.figure().axes[0]
    assert [text.get_text() for text in axes.texts] == ["90.0", "10.0", "33.3", "20.0", "80.0", "100.0"]
    assert axes.get_title("left") == "Transfer of features: accuracy (%)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "a network of a very\nlong name"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("evaluated on", "features from")
    paths = found.save(tmp_path / "transfer")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and all(path.stat().st_size for path in paths)
    assert read_json(paths[0]) == json.loads(json.dumps(with_digest(found.record())))


@pytest.mark.parametrize("name", ["transfer", "alignment"])
def test_runs_on_different_data_raise_before_any_work(digits, name, monkeypatch):
    for function in ("apply_recipe", "alignment"):
        module = sys.modules["advnorm.analysis.transfer"]
        monkeypatch.setattr(module, function, lambda *_, **__: pytest.fail("the work started"))
    compare = ANALYSES.get(name).run
    larger = digits.target("bn", name="larger", images=digits.x.repeat(1, 1, 2, 2))
    with raises_problem("conflict", "targets"):
        compare([digits.target("bn"), larger])
    fewer = digits.target("bn", name="fewer", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    with raises_problem("conflict", "targets"):
        compare([digits.target("bn"), fewer])


def test_long_names_of_runs_fit_beside_and_below_the_matrix(apart):
    names = tuple(f"cifar10-preact_resnet18-dual_bn-hybrid-eps16_255-fb58506a-seed{n} (adv)" for n in range(3))
    row = dict.fromkeys(names, 0.5)
    figure = Transfer(accuracy=dict.fromkeys(names, row), images=dict.fromkeys(names, 9)).figure()
    apart(figure, [*figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()])
