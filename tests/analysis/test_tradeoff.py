"""Accuracies between two branches: the ends are the branches, recalibration is that of the norms."""

import json
import sys

import pytest
import torch

import advnorm
from advnorm.analysis import ANALYSES, tradeoff
from advnorm.analysis.tradeoff import mixed_images
from advnorm.attacks import PGD
from advnorm.evaluation import benchmark
from support.problems import raises_problem

THREAT = advnorm.ThreatModel(eps=0.1)


def test_the_ends_of_the_curve_are_the_branches(digits, untouched):
    model, x, y = digits.networks["dual_bn"], digits.x[:64], digits.y[:64]
    attack, x_adv = PGD(threat=THREAT, steps=2), (digits.x[:64] + 0.1).clamp(0, 1)
    with untouched(model):
        found = tradeoff(model, x, y, attack, x_adv=x_adv, mixtures=3, batch_size=64)
    assert [(row.share, row.statistics) for row in found.rows] == [
        (share, kind) for share in (0.0, 0.5, 1.0) for kind in ("interpolated", "recalibrated")
    ]
    for row, domain in ((found.rows[0], "clean"), (found.rows[4], "adv")):
        own = benchmark(model, (x, y), THREAT, {"pgd": attack}, domain, batch_size=64)
        assert (row.clean, row.robust) == (own.accuracy(), own.robust_accuracy())
    twin = advnorm.strip(model, route="adv")
    for module in twin.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.reset_running_stats()
            module.momentum = None
    twin.train()(x_adv)  # one batch: its moments replace the statistics
    own = benchmark(twin.eval(), (x, y), THREAT, {"pgd": attack}, batch_size=64)
    assert found.rows[5].clean == own.accuracy() and abs(found.rows[5].robust - own.robust_accuracy()) <= 1 / 64


def test_the_share_of_adversarial_images_is_exact():
    x = torch.zeros(10, 1, 2, 2)
    for count in range(11):
        assert mixed_images(x, x + 1, count / 10).mean().item() == pytest.approx(count / 10)
    assert x.sum() == 0


def test_no_label_enters_the_recalibrated_statistics(digits, monkeypatch):
    """Adversarial images of the labels would carry them: the statistics are the same for other labels."""
    seen = []
    module = sys.modules["advnorm.analysis.tradeoff"]  # the package has the function under this name
    monkeypatch.setattr(module, "recalibrate", lambda model, images, **_: seen.append(images))
    for labels in (digits.y[:40], (digits.y[:40] + 1) % 10):
        target = digits.target("dual_bn", digits.x[:40], labels)
        found = ANALYSES.get("tradeoff").run(target, attack="fgsm", mixtures=2)
    assert len(seen) == 4 and torch.equal(seen[1], seen[3]) and not torch.equal(seen[0], seen[1])
    assert "evaluated images" in found.draw().axes[0].get_xlabel()
    assert found.conditions["recalibrated_by"] == "the evaluated images"


def test_a_run_is_drawn_and_recorded(digits, tmp_path):
    target = digits.target("dual_bn", digits.x[:40], digits.y[:40])
    found = ANALYSES.get("tradeoff").run(target, attack="pgd10", mixtures=3)
    json_path, svg, png = found.save(tmp_path / "tradeoff")
    record = json.loads(json_path.read_text())
    assert record["attack"] == "pgd10" and len(record["rows"]) == 6 and svg.stat().st_size and png.stat().st_size
    assert found.table()[0] == ["share of adv", "statistics", "clean", "pgd10"]
    with raises_problem("wrong_route", "domains"):
        ANALYSES.get("tradeoff").run(digits.target("bn", digits.x[:40], digits.y[:40]))
    with raises_problem("out_of_range", "mixtures"):
        ANALYSES.get("tradeoff").run(target, mixtures=1)
    with raises_problem("wrong_shape", "x_adv"):
        tradeoff(target.model, target.images, target.labels, target.attack, x_adv=target.images[:3])
