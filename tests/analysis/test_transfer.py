"""Transfer between models that agree and disagree by construction (paper D, table 3 and fig. 7)."""

from __future__ import annotations

import dataclasses
import json
import sys

import pytest
import torch
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.records import read_json
from advnorm.analysis import ANALYSES
from advnorm.analysis.features import extract_features
from advnorm.analysis.transfer import (
    Alignment,
    Transfer,
    alignment,
    alignment_of_runs,
    predicted,
    transfer,
    transfer_between,
)
from advnorm.data import add_split, load
from advnorm.evaluation import open_run


class Reader(nn.Module):
    """Says the class that a pixel shows: ``pixel / 4`` for four classes, shifted by ``offset``."""

    def __init__(self, pixel: int, offset: int = 0) -> None:
        super().__init__()
        self.pixel, self.offset = pixel, offset

    def forward(self, x):
        shown = (x.flatten(1)[:, self.pixel] * 4).round().long()
        return nn.functional.one_hot((shown + self.offset) % 4, 4).float() + 0 * x.flatten(1).sum(1, keepdim=True)


def showing(first, second):
    """Images whose pixels 0 and 1 show classes."""
    x = torch.full((len(first), 1, 8, 8), 0.5)
    x[:, 0, 0, 0], x[:, 0, 0, 1] = torch.as_tensor(first) / 4, torch.as_tensor(second) / 4
    return x


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
    assert found.accuracy == ((1, 1, 0, 0), (1, 1, 1, 0), (0, 0, 1, 0), (0.5, 0.5, 0, 0))
    assert found.sources == ("first", "both", "second", "half") and found.targets == tuple(models)
    assert found.images == (40,) * 4
    assert found.record()["accuracy"]["second"] == {"first": 0, "same": 0, "second": 1, "shifted": 0}


def test_what_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError, match="no models given; no sets of images given; routes name no model 'a'"):
        transfer({}, {}, routes={"a": "adv"})


def test_classes_do_not_depend_on_the_batch_size_and_the_model_is_as_before(digits, untouched):
    model = digits.networks["dual_bn"].train()
    with untouched(model):
        found = [predicted(model, digits.x, route="adv", batch_size=size) for size in (300, 64)]
    model.eval()
    assert torch.equal(*found)
    with torch.no_grad(), advnorm.route(model, "adv"):
        assert torch.equal(found[0], model(digits.x).argmax(1))


def test_adversarial_examples_fool_their_own_model_most(digits):
    subjects = [digits.subject("bn"), digits.subject("dual_bn")]
    seen = []
    found = transfer_between(subjects, source="adversarial", progress=lambda *done: seen.append(done))
    assert found.targets == found.sources == ("bn", "dual_bn (clean)", "dual_bn (adv)")
    x_adv = subjects[0].attack(digits.networks["bn"], digits.x, digits.y)
    with torch.no_grad():
        expected = (digits.networks["bn"](x_adv).argmax(1) == digits.y).double().mean()
    assert found.accuracy[0][0] == pytest.approx(float(expected), abs=0.01)
    assert found.accuracy[0][0] < min(found.accuracy[1][0], found.accuracy[2][0])
    assert seen[-1] == (900, 900)
    assert found.conditions["runs"]["dual_bn (adv)"]["route"] == "adv"


def test_crafting_with_the_attack_of_a_training_on_batch_statistics_moves_none(digits, untouched):
    subject = digits.subject("bn")
    feeding = dataclasses.replace(subject.attack, statistics="batch")
    with untouched(subject.model):
        found = transfer_between([dataclasses.replace(subject, attack=feeding)], source="adversarial")
    assert found.accuracy == transfer_between([subject], source="adversarial").accuracy


def test_features_serve_the_model_they_come_from_best(digits):
    subjects = [
        digits.subject("bn", images=digits.x[:60], labels=digits.y[:60]),
        digits.subject("none", images=digits.x[:60], labels=digits.y[:60]),
    ]
    found = transfer_between(subjects, steps=25)
    assert found.what == "features" and found.conditions["steps"] == 25
    assert found.accuracy[0][0] > 0.7
    assert found.accuracy[0][0] >= found.accuracy[1][0]
    with pytest.raises(ConfigError, match="did you mean 'features'"):
        transfer_between(subjects, source="feature")


def test_the_heat_map_has_a_number_in_every_cell(tmp_path):
    found = Transfer(
        sources=("a", "b"),
        targets=("a", "b", "a network of a very long name"),
        accuracy=((0.9, 0.1, 0.333), (0.2, 0.8, 1.0)),
        images=(10, 10),
        what="features",
    )
    axes = found.figure().axes[0]
    assert [text.get_text() for text in axes.texts] == ["90.0", "10.0", "33.3", "20.0", "80.0", "100.0"]
    assert axes.get_title("left") == "How features transfer: accuracy (%)"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["a", "b", "a network of a very\nlong name"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("judged by", "features from")
    paths = found.save(tmp_path / "transfer")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and all(path.stat().st_size for path in paths)
    assert read_json(paths[0]) == json.loads(json.dumps(found.record()))


# -- conflicting features ----------------------------------------------------------------------------------------------


def test_a_network_is_aligned_with_the_features_it_learned():
    """Trained on robust features of t and non-robust ones of t + 1, labelled t + 1; ordinary images show y in both."""
    y = torch.arange(20) % 4
    x = showing(y, y)
    by_robust, by_non_robust, neither = Reader(0, offset=1), Reader(1), Reader(0, offset=2)
    found = alignment({"robust": by_robust, "non-robust": by_non_robust, "neither": neither}, x, y)
    assert found.robust == (1, 0, 0) and found.non_robust == (0, 1, 0)
    assert alignment({"": neither}, x, y, offset=2).robust == (1,)
    with pytest.raises(ConfigError, match="multiple of the 4 classes"):
        alignment({"": neither}, x, y, offset=4)


def test_along_training_networks_come_one_by_one_and_the_figure_is_a_line(tmp_path):
    y = torch.arange(20) % 4
    epochs = ((epoch, Reader(0, offset=1) if epoch < 2 else Reader(0)) for epoch in range(4))
    found = alignment(epochs, showing(y, y), y)
    assert found.names == (0, 1, 2, 3) and found.robust == (1, 1, 0, 0)
    axes = found.figure().axes[0]
    assert axes.get_xlabel() == "epoch" and len(axes.lines) == 2
    assert sorted(text.get_text() for text in axes.texts) == ["non-robust features", "robust features"]
    assert list(axes.lines[1].get_ydata()) == [0, 0, 100, 100]
    paths = found.save(tmp_path / "alignment")
    assert len(paths) == 3 and read_json(paths[0]) == json.loads(json.dumps(found.record()))


def test_a_run_on_ordinary_images_has_nothing_to_align(digits):
    runs = [digits.subject("bn", origin={"trained_on": "D_conflict"}), digits.subject("none")]
    for source in ("digits", "D_R"):
        with pytest.raises(ConfigError, match=f"none was trained on {source}.*D_conflict"):
            alignment_of_runs([runs[0], digits.subject("none", origin={"trained_on": source})])
    assert alignment_of_runs(runs).names == ("bn", "none")


def test_the_offset_is_that_of_the_set_a_run_was_trained_on(digits, tmp_path):
    data = load("digits", "train").take(slice(0, 60))
    runs = {}
    for recipe, offset in (("D_det", 3), ("D_det", 1), ("D_rand", 3)):
        root = tmp_path / f"{recipe}{offset}"
        extract_features(digits.networks["bn"], data, recipe, root, offset=offset, steps=1)
        add_split(root, load("digits", "test").take(slice(0, 40)))
        config = advnorm.Config(data="features", objective="standard", epochs=1, batch_size=16, name=root.name)
        run = advnorm.train(config, out=tmp_path / "runs", data_dir=root, device="cpu")
        runs[root.name] = open_run(run, data_dir=root, device="cpu").sample(None)
    far, near = runs["D_det3"], runs["D_det1"]
    assert load("features", "train", tmp_path / "D_det3").name == "D_det(offset=3)"
    assert [runs[name].conditions["trained_on"] for name in ("D_det1", "D_rand3")] == ["D_det", "D_rand"]
    found, expected = alignment_of_runs([far]), alignment({"": far.model}, far.images, far.labels, offset=3)
    assert (found.offset, found.robust) == (3, expected.robust)
    assert alignment_of_runs([near]).offset == 1 and alignment_of_runs([far], offset=3) == found
    with pytest.raises(ConfigError, match="D_det3-seed0 was trained on features with offset 3, got 1; leave it out"):
        alignment_of_runs([far], offset=1)
    with pytest.raises(ConfigError, match="different offsets: 3 for D_det3-seed0, 1 for D_det1-seed0; .* at a time"):
        alignment_of_runs([far, near])
    unknown = digits.subject("bn")
    assert (alignment_of_runs([unknown]).offset, alignment_of_runs([unknown], offset=2).offset) == (1, 2)
    assert alignment_of_runs([unknown, far]).offset == 3


def test_runs_are_compared_by_bars(digits):
    found = alignment_of_runs([digits.subject("bn"), digits.subject("dual_bn")])
    assert isinstance(found, Alignment) and found.names == ("bn", "dual_bn (clean)", "dual_bn (adv)")
    assert found.non_robust[0] == pytest.approx(
        float((predicted(digits.networks["bn"], digits.x) == digits.y).double().mean())
    )
    assert sum(len(bars) for bars in found.figure().axes[0].containers) == 6
    assert {"transfer", "alignment", "features"} <= set(ANALYSES)


@pytest.mark.parametrize("compare", [transfer_between, alignment_of_runs])
def test_runs_on_different_data_are_refused_before_any_work(digits, compare, monkeypatch):
    for place in ("make_features", "alignment"):
        monkeypatch.setattr(sys.modules[transfer.__module__], place, lambda *_, **__: pytest.fail("it began"))
    larger = digits.subject("bn", name="larger", images=digits.x.repeat(1, 1, 2, 2))
    with pytest.raises(ConfigError, match=r"\(1, 8, 8\) for bn, \(1, 16, 16\) for larger.*one data set"):
        compare([digits.subject("bn"), larger])
    fewer = digits.subject("bn", name="fewer", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 4)))
    with pytest.raises(ConfigError, match="10 for bn, 4 for fewer.*one data set"):
        compare([digits.subject("bn"), fewer])


def test_long_names_of_runs_fit_beside_and_below_the_matrix(apart):
    names = tuple(f"cifar10-preact_resnet18-dual_bn-hybrid-eps16_255-fb58506a-seed{n} (adv)" for n in range(3))
    figure = Transfer(sources=names, targets=names, accuracy=((0.5,) * 3,) * 3, images=(9,) * 3).figure()
    apart(figure, [*figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()])
