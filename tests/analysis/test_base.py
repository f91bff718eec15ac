"""Settings, records and batches that all analyses share."""

import math

import pytest
import torch

import advnorm
from advnorm._core.registry import keywords
from advnorm.analysis import ANALYSES, landscape, ligs, list_analyses, perturbed_accuracy, reporting_progress
from advnorm.analysis.banks import Distance
from advnorm.analysis.base import to_record
from advnorm.analysis.images import even_slices, track
from advnorm.analysis.perturbed_statistics import StatisticsPerturbation
from advnorm.analysis.settings import is_declared
from support.problems import raises_problem


@pytest.mark.parametrize("name", ANALYSES)
def test_every_option_of_an_analysis_is_declared_with_its_help(name):
    analysis = ANALYSES.get(name)
    assert all(parameter.annotation.__metadata__[0].help for parameter in analysis.options().values())
    if analysis.takes != "images":
        assert all(map(is_declared, keywords(analysis.function).values()))


def test_a_record_has_json_types_only():
    values = {("clean", "adv"): Distance(1.0, 2.0), "tensor": torch.tensor([1.0, math.nan]), 3: (math.inf, None, "x")}
    assert to_record(values) == {
        "clean-adv": {"mean": 1.0, "std": 2.0, "total": 3.0},
        "tensor": [1.0, None],
        "3": [None, None, "x"],
    }


def test_analyses_are_listed_by_pattern():
    assert "ligs" in list_analyses("l*")


def test_an_analysis_without_progress_of_its_own_reports_to_the_enclosing_scope(digits):
    outer, own = [], []
    analysis, targets = ANALYSES.get("ligs"), [digits.target("bn", digits.x[:8], digits.y[:8])]
    with reporting_progress(lambda *at: outer.append(at)):
        analysis.run(targets)
        seen = len(outer)
        analysis.run(targets, progress=lambda *at: own.append(at))
    assert seen > 0 and len(own) == seen == len(outer)


def test_a_loop_inside_another_one_reports_fractions_of_its_steps():
    seen = []
    with reporting_progress(lambda *at: seen.append(at)):
        for _ in track("ab"):
            for _ in track("cd"):
                pass
            for _ in track("efg"):
                break  # the rest of this loop is not done
    assert seen == [(0.5, 2), (1, 2), (1, 2), (1.5, 2), (2, 2), (2, 2)]
    assert list(track("ab")) == ["a", "b"], "outside of a scope"


def test_an_unknown_option_raises(digits):
    with raises_problem("unknown_name", "sise"):
        ANALYSES.get("ligs").run([digits.target("bn")], sise=0.1)


@pytest.mark.parametrize("norm", ["gmm_bn", "cross_bn"])
def test_batches_of_one_domain_raise_for_norms_that_need_both(digits, norm):
    model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
    x, y, route = digits.x[:8], digits.y[:8], "adv" if norm == "cross_bn" else None
    attacks = {"gradient": StatisticsPerturbation(radius=0.1, route=route)}
    analyses = [
        lambda how: ligs(model, x, y, route=route, statistics=how),
        lambda how: landscape(model, x, y, route=route, statistics=how),
    ]
    for analyse in (*analyses, lambda _: perturbed_accuracy(model, x, y, attacks)):
        with raises_problem("conflict", "statistics"):
            analyse("batch_frozen")
    for analyse in analyses:
        analyse("running")


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 129, 300])
def test_batches_differ_by_at_most_one_image(count):
    sizes = [rows.stop - rows.start for rows in even_slices(count, 64)]
    assert sum(sizes) == count and max(sizes) <= 64 and max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-count // 64)
