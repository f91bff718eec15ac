"""Accuracy under corruptions against a loop by hand, and statistics adapted by hand (paper D, fig. 1, table 7)."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.records import read_json
from advnorm._core.shapes import with_digest
from advnorm.analysis import ANALYSES, corruption_accuracy
from advnorm.analysis.corruption_accuracy import CorruptionAccuracy, CorruptionScore
from advnorm.data import corrupt, list_corruptions
from support.problems import raises_problem

FEW = ("contrast", "gaussian_noise")


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def plain_network(digits):
    """Return the same network with built-in norms."""
    plain = advnorm.strip(digits.networks["bn"])
    assert any(isinstance(module, nn.BatchNorm2d) for module in plain.modules())
    return plain


def adapted_by_hand(plain, x):
    """Set the statistics of the whole set in one batch; momentum None averages over batches."""
    twin = copy.deepcopy(plain)
    for module in twin.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
            module.train()
    with torch.no_grad():
        twin(x)
    return twin.eval()


@pytest.mark.parametrize("built_in", [True, False])
def test_accuracy_is_that_of_a_loop_by_hand(built_in, digits, untouched):
    plain = plain_network(digits)
    model = plain if built_in else digits.networks["bn"]
    with untouched(model):
        found = corruption_accuracy(
            model, digits.x, digits.y, corruptions=FEW, severities=(1, 5), adapt=True, batch_size=300, seed=3
        )
    assert found.clean == accuracy(plain, digits.x, digits.y)
    for name in FEW:
        for place, severity in enumerate((1, 5)):
            images = corrupt(digits.x, name, severity, seed=3)
            assert found.accuracy[name][place] == pytest.approx(accuracy(plain, images, digits.y), abs=1e-9)
            by_hand = accuracy(adapted_by_hand(plain, images), images, digits.y)
            assert found.adapted[name][place] == pytest.approx(by_hand, abs=1 / 300 + 1e-9)
    assert found.mean == pytest.approx(np.mean([found.accuracy[name] for name in FEW]))
    assert found.adapted_mean == pytest.approx(np.mean([found.adapted[name] for name in FEW]))


def test_adapting_repairs_a_change_of_the_statistics(digits):
    """Contrast scales every input: the statistics of the corrupted images undo it."""
    found = corruption_accuracy(digits.networks["bn"], digits.x, digits.y, corruptions="contrast", adapt=True)
    assert found.adapted["contrast"][4] > found.accuracy["contrast"][4] + 0.05
    assert found.adapted["contrast"][4] > found.clean - 0.1


def test_corrupted_images_do_not_depend_on_the_batch_size(digits):
    settings = {"corruptions": ["impulse_noise", "fog"], "severities": (4,)}
    model, x, y = digits.networks["bn"], digits.x, digits.y
    first, second = (corruption_accuracy(model, x, y, batch_size=size, **settings) for size in (300, 64))
    assert first == second


def test_a_branch_is_evaluated_and_adapted_with_its_own_bank(digits, untouched):
    model, images = digits.networks["dual_bn"], corrupt(digits.x, "contrast", 5)
    with untouched(model):
        found = corruption_accuracy(
            model, digits.x, digits.y, corruptions=["contrast"], severities=[5], adapt=True, route="adv"
        )
    branch = advnorm.strip(model, "adv")
    assert found.accuracy["contrast"] == (pytest.approx(accuracy(branch, images, digits.y)),)
    by_hand = accuracy(adapted_by_hand(branch, images), images, digits.y)
    assert found.adapted["contrast"] == (pytest.approx(by_hand, abs=0.02),)


def test_all_problems_are_reported_at_once(digits):
    with pytest.raises(ConfigError) as error:
        corruption_accuracy(
            digits.networks["none"], digits.x, digits.y, corruptions=["fgo"], severities=[6], adapt=True, batch_size=0
        )
    assert [(problem.code, problem.field) for problem in error.value.problems] == [
        ("out_of_range", "batch_size"),
        ("unknown_name", "corruption"),
        ("out_of_range", "severity"),
        ("conflict", "adapt"),
    ]


# -- arrays ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    """CIFAR-10-C in miniature: twenty images for each level instead of ten thousand."""
    for name in ("advnorm.analysis.corruption_accuracy", "advnorm.data.cifar10c"):
        monkeypatch.setattr(sys.modules[name], "IMAGES_PER_SEVERITY", 20)
    folder = tmp_path / "CIFAR-10-C"
    folder.mkdir()
    generator = np.random.default_rng(0)
    labels = np.tile(np.arange(20) % 10, 5).astype(np.uint8)
    for name in (*list_corruptions(), "frost", "saturate"):
        np.save(folder / f"{name}.npy", generator.integers(0, 256, (100, 32, 32, 3), dtype=np.uint8))
    np.save(folder / "labels.npy", labels)
    return folder


def test_the_published_arrays_are_read_if_given(arrays):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    x, y = torch.rand(12, 3, 32, 32), torch.arange(12) % 10
    found = corruption_accuracy(model, x, y, severities=(2,), arrays=arrays)
    assert len(found.accuracy) == 15 and "frost" in found.accuracy
    level = torch.from_numpy(np.load(arrays / "frost.npy")[20:32]).permute(0, 3, 1, 2).float() / 255
    assert found.accuracy["frost"] == (pytest.approx(accuracy(model, level, y)),)
    assert corruption_accuracy(model, x, y, corruptions=["saturate"], arrays=arrays).accuracy["saturate"]
    with raises_problem("conflict", "arrays"):
        corruption_accuracy(model, x, 9 - y, arrays=arrays)
    rows = torch.tensor([19, 0, 7])
    chosen = corruption_accuracy(model, x[:3], rows % 10, corruptions=["frost"], severities=2, arrays=arrays, rows=rows)
    level = torch.from_numpy(np.load(arrays / "frost.npy")[20 + rows.numpy()]).permute(0, 3, 1, 2).float() / 255
    assert chosen.accuracy["frost"] == (pytest.approx(accuracy(model, level, rows % 10)),)


def test_norms_that_are_not_converted_are_adapted_too():
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.Flatten()
    )
    plain.append(nn.Linear(6 * 12 * 12, 10)).eval()
    mixed = copy.deepcopy(plain)
    advnorm.convert_norm(mixed, "bn", keep=["1"])
    x, y = torch.rand(40, 3, 16, 16), torch.arange(40) % 10
    one, other = (
        corruption_accuracy(m, x, y, corruptions="contrast", severities=5, adapt=True) for m in (plain, mixed)
    )
    assert one.adapted == other.adapted and one.accuracy == other.accuracy


# -- the finding -------------------------------------------------------------------------------------------------------


def test_runs_are_compared_and_drawn(digits, tmp_path):
    few = {"images": digits.x[:100], "labels": digits.y[:100]}
    targets = [digits.target(norm, **few) for norm in ("bn", "dual_bn", "none")]
    seen = []
    found = ANALYSES.get("corruptions").run(
        targets, corruptions=FEW, severities=(1, 3, 5), progress=lambda *done: seen.append(done)
    )
    assert list(found.networks) == ["bn", "dual_bn (clean)", "dual_bn (adv)", "none"]
    assert found.networks["none"].adapted is None and found.networks["bn"].adapted is not None
    steps = [pytest.approx(done / 6) for done in range(1, 7)]
    assert [done for done, _ in seen] == [*steps, 1], "two corruptions at three severities, once for all networks"
    assert {total for _, total in seen} == {1}
    left, right = found.figure().axes
    assert [text.get_text() for text in left.get_yticklabels()] == ["contrast", "gaussian noise"]
    assert (left.get_title("left"), right.get_title("left")) == ("By corruption", "By severity")
    assert len(left.lines) == len(right.lines) == 7, "four networks, three of them adapted as well"
    legend = [text.get_text() for text in left.figure.legends[0].get_texts()]
    assert legend == [*found.networks, "statistics adapted (hollow)"]
    paths = found.save(tmp_path / "corruptions")
    assert [path.suffix for path in paths] == [".json", ".svg", ".png"] and all(path.stat().st_size for path in paths)
    assert read_json(paths[0]) == json.loads(json.dumps(with_digest(found.record())))


def test_runs_on_different_images_keep_their_own(digits):
    parts = (slice(0, 100), slice(100, 180), slice(0, 100))
    targets = [
        digits.target(norm, images=digits.x[rows], labels=digits.y[rows])
        for norm, rows in zip(("bn", "none", "dual_bn"), parts)
    ]
    how = {"corruptions": FEW, "severities": (2,)}
    found = ANALYSES.get("corruptions").run(targets, **how, adapt=False)
    assert list(found.networks) == ["bn", "none", "dual_bn (clean)", "dual_bn (adv)"]
    for name, score in found.networks.items():
        norm, _, branch = name.rstrip(")").partition(" (")
        rows = slice(100, 180) if norm == "none" else slice(0, 100)
        alone = corruption_accuracy(digits.networks[norm], digits.x[rows], digits.y[rows], route=branch or None, **how)
        assert score == alone


def test_runs_with_other_batches_or_labels_keep_their_own(digits):
    x, y = digits.x[:100], digits.y[:100]
    targets = [digits.target("bn", images=x, labels=labels) for labels in (y, (y + 1) % 10, y)]
    targets[2] = replace(targets[2], batch_size=2)
    how = {"corruptions": FEW, "severities": [3, 5], "adapt": True}
    found = ANALYSES.get("corruptions").run(targets, **how)
    for score, target in zip(found.networks.values(), targets):
        alone = corruption_accuracy(target.model, x, target.labels, batch_size=target.batch_size, **how)
        assert score == alone
    assert len({score.mean for score in found.networks.values()}) == 2


def test_a_repeated_corruption_is_measured_once(digits):
    how = {"severities": (1,)}
    once, twice = (
        corruption_accuracy(digits.networks["bn"], digits.x[:50], digits.y[:50], corruptions=names, **how)
        for names in (["fog"], ["fog", "fog"])
    )
    assert once == twice and len(twice.accuracy["fog"]) == 1


def test_every_run_is_checked_before_any_work(digits):
    x, y = digits.x[:20], digits.y[:20]
    good = digits.target("bn", images=x, labels=y)
    seen = []
    with raises_problem("wrong_shape", "labels"):
        ANALYSES.get("corruptions").run(
            [good, replace(good, data=(x, y[:5]))], corruptions=FEW, progress=lambda *done: seen.append(done)
        )
    assert not seen


def test_frost_needs_the_arrays(digits):
    with raises_problem("not_supported", "corruption"):
        corruption_accuracy(digits.networks["bn"], digits.x, digits.y, corruptions="frost")


def test_lines_are_means_over_corruptions_and_dots_means_over_severities():
    score = CorruptionScore(
        clean=1.0, severities=(1, 2), accuracy={"fog": (0.8, 0.4), "snow": (0.6, 0.2)}, adapted=None
    )
    found = CorruptionAccuracy(networks={"net": score}, images=10, corruptions="made")
    left, right = found.figure().axes
    np.testing.assert_allclose(left.lines[0].get_xdata(), [60, 40])
    np.testing.assert_allclose(right.lines[0].get_ydata(), [100, 70, 30])
    assert score.mean == pytest.approx(0.5) and score.adapted_mean is None


def test_the_panels_stay_readable_below_few_corruptions_and_above_many_names():
    score = CorruptionScore(clean=0.9, severities=(1, 2), accuracy={"fog": (0.8, 0.7)})
    names = [f"cifar10-preact_resnet18-dual_bn-hybrid-eps16_255-fb58506a-seed{n}" for n in range(8)]
    found = CorruptionAccuracy(networks=dict.fromkeys(names, score), images=9, corruptions="made")
    figure = found.figure()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns if no room is left for the panels
        FigureCanvasAgg(figure).draw()
    assert all(axes.bbox.height > figure.dpi for axes in figure.axes)  # an inch


def test_severities_are_sorted_unique_integers(digits):
    found = corruption_accuracy(
        digits.networks["bn"], digits.x[:8], digits.y[:8], corruptions="brightness", severities=[2, 1, 2]
    )
    assert found.severities == (1, 2) and len(found.accuracy["brightness"]) == 2
    with raises_problem("wrong_type", "severities"):
        corruption_accuracy(digits.networks["bn"], digits.x[:8], digits.y[:8], severities=[1.0])


def test_a_network_in_double_precision_adapts_too(digits):
    how = {"corruptions": "brightness", "severities": 3, "adapt": True, "batch_size": 64}
    model = digits.networks["bn"]
    wide = corruption_accuracy(copy.deepcopy(model).double(), digits.x[:65], digits.y[:65], **how)
    assert wide.adapted_mean == pytest.approx(
        corruption_accuracy(model, digits.x[:65], digits.y[:65], **how).adapted_mean, abs=0.02
    )
