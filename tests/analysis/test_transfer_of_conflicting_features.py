"""Networks that learned robust or non-robust features by construction (paper D, fig. 7)."""

from __future__ import annotations

import json

import pytest
import torch

import advnorm
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, alignment, extract_features
from advnorm.analysis.images import predict_classes
from advnorm.analysis.transfer import Alignment
from advnorm.data import add_split, load
from advnorm.evaluation import open_run
from support.class_readers import Reader, showing
from support.problems import raises_problem

align = ANALYSES.get("alignment").run


def test_a_network_is_aligned_with_the_features_it_learned():
    """Trained on robust features of t and non-robust ones of t + 1, labelled t + 1; ordinary images show y in both."""
    y = torch.arange(20) % 4
    x = showing(y, y)
    by_robust, by_non_robust, neither = Reader(0, offset=1), Reader(1), Reader(0, offset=2)
    found = alignment({"robust": by_robust, "non-robust": by_non_robust, "neither": neither}, x, y)
    assert found.aligned_with_robust_features == (1, 0, 0) and found.aligned_with_non_robust_features == (0, 1, 0)
    assert alignment({"": neither}, x, y, offset=2).aligned_with_robust_features == (1,)
    with raises_problem("out_of_range", "offset"):
        alignment({"": neither}, x, y, offset=4)


def test_networks_of_a_training_are_evaluated_in_order_and_drawn_as_lines(tmp_path):
    y = torch.arange(20) % 4
    epochs = ((epoch, Reader(0, offset=1) if epoch < 2 else Reader(0)) for epoch in range(4))
    found = alignment(epochs, showing(y, y), y)
    assert found.names == (0, 1, 2, 3) and found.aligned_with_robust_features == (1, 1, 0, 0)
    axes = found.figure().axes[0]
    assert axes.get_xlabel() == "epoch" and len(axes.lines) == 2
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()] == [
        "robust features",
        "non-robust features",
    ]
    assert list(axes.lines[1].get_ydata()) == [0, 0, 100, 100]
    paths = found.save(tmp_path / "alignment")
    assert len(paths) == 3 and read_json(paths[0]) == json.loads(json.dumps(with_digest(found.record())))


def test_a_run_on_ordinary_images_raises(digits):
    runs = [digits.target("bn", origin={"trained_on": "D_conflict"}), digits.target("none")]
    for source in ("digits", "D_R"):
        with raises_problem("not_supported", "targets"):
            align([runs[0], digits.target("none", origin={"trained_on": source})])
    assert align(runs).names == ("bn", "none")


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
    found, expected = align([far]), alignment({"": far.model}, far.images, far.labels, offset=3)
    assert (found.offset, found.aligned_with_robust_features) == (3, expected.aligned_with_robust_features)
    assert align([near]).offset == 1 and align([far], offset=3) == found
    with raises_problem("conflict", "offset"):
        align([far], offset=1)
    with raises_problem("conflict", "targets"):
        align([far, near])
    unknown = digits.target("bn")
    assert (align([unknown]).offset, align([unknown], offset=2).offset) == (1, 2)
    assert align([unknown, far]).offset == 3


def test_runs_are_compared_by_bars(digits):
    found = align([digits.target("bn"), digits.target("dual_bn")])
    assert isinstance(found, Alignment) and found.names == ("bn", "dual_bn (clean)", "dual_bn (adv)")
    assert found.aligned_with_non_robust_features[0] == pytest.approx(
        float((predict_classes(digits.networks["bn"], digits.x) == digits.y).double().mean())
    )
    assert sum(len(bars) for bars in found.figure().axes[0].containers) == 6
    assert {"transfer", "alignment", "features"} <= set(ANALYSES)
