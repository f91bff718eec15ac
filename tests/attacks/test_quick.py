"""The quick estimate: close to AutoAttack at a fraction of its passes, decided per image by strict float32 forwards."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from advnorm import attacks
from advnorm.attacks import APGD, AutoAttack, Quick
from advnorm.attacks.autoattack.record import CascadeRecord, CascadeResult
from advnorm.evaluation import benchmark
from support.autoattack_models import Double, Wrapped, overflowing, same


def passes(result: CascadeResult) -> int:
    return sum(result.forwards.values()) + sum(result.backwards.values())


def test_quick_agrees_with_autoattack_at_a_fraction_of_its_passes(linf):
    x, y = linf.first(60)
    quick, full = (attack(threat=linf.threat).evaluate(linf.model, x, y) for attack in (Quick, AutoAttack))
    assert 0.2 < full.robust_accuracy < full.clean_accuracy - 0.05
    assert (quick.robust != full.robust).sum() <= 1
    assert passes(quick) < 0.1 * passes(full)
    assert "AutoAttack standard" in str(full) and "Quick estimate (not AutoAttack)" in str(quick)


@pytest.mark.parametrize("norm", ["Linf", "L2", "L1"])
def test_the_result_of_an_image_depends_on_neither_its_batch_nor_the_other_images(trained, norm):
    t = trained[norm]
    (x, y), index = t.first(30), torch.arange(30)
    model, attack = Double(t.model), Quick(threat=t.threat, steps=6, targets=3)
    whole = attack.evaluate(model, x, y)
    assert 0 < whole.robust_accuracy < whole.clean_accuracy
    assert same(whole, replace(attack, batch_size=7).evaluate(model, x, y))
    some = index[5::3].flip(0)
    part = attack.evaluate(model, x[some], y[some], index=some)
    assert torch.equal(part.fooled_by, whole.fooled_by[some]) and torch.equal(part.x_adv, whole.x_adv[some])


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_strict_forward_confirms_each_verdict(linf, precision):
    x, y = linf.first(100)
    result = Quick(threat=linf.threat, precision=precision).evaluate(linf.model, x, y)
    with torch.no_grad():
        assert torch.equal(linf.model(result.x_adv).argmax(1) == y, result.robust)
    assert torch.equal(linf.threat.project(result.x_adv, x), result.x_adv)


def test_images_that_a_surrogate_cannot_see_are_attacked_in_float32(linf):
    x, y = linf.first(100)
    strict = Quick(threat=linf.threat).evaluate(linf.model, x, y)
    bright = x.flatten(1).mean(1).median()
    search = overflowing(linf.model, lambda x: x.flatten(1).mean(1) > bright)
    result = Quick(threat=linf.threat).evaluate(linf.model, x, y, search=search)
    assert result.stages[-1] == "float32" and (result.robust & ~strict.robust).sum() <= 3


def test_the_scale_of_the_logits_changes_nothing(linf):
    x, y = linf.first(40)
    scaled = Wrapped(linf.model, after=lambda logits: 1024 * logits)
    attack = Quick(threat=linf.threat, steps=6)
    assert same(attack.evaluate(linf.model, x, y), attack.evaluate(scaled, x, y))


def test_the_passes_of_an_image_are_bounded_by_13_percent_of_autoattack(linf):
    """Images that resist everything, none of which skips a stage."""
    x, y = linf.first(60)
    robust = Quick(threat=linf.threat).evaluate(linf.model, x, y).robust
    x, y = x[robust], y[robust]
    attack = Quick(threat=linf.threat, hopeless=1, near=1)
    every = attack.evaluate(linf.model, x, y)
    autoattack = 2 * 101 + 2 * 9 * 101 + 3 * 9 * 100 + 5000  # APGD-CE, APGD-T, FAB-T and Square
    assert every.robust.all() and passes(every) <= 0.13 * autoattack * len(x)
    assert passes(replace(attack, hopeless=0.5, near=0.15).evaluate(linf.model, x, y)) < passes(every)
    none = replace(attack, hopeless=0, near=0).evaluate(linf.model, x, y)
    assert none.forwards["targets"] == none.forwards["deep"] == none.forwards["boundary"] == 0


class Rounded(nn.Module):
    """A model whose gradient is zero everywhere."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = copy.deepcopy(model)

    def forward(self, x):
        return self.model((x * 32).round() / 32)


def test_square_searches_where_gradients_vanish(linf):
    x, y = linf.first(40)
    model = Rounded(linf.model)
    result = Quick(threat=linf.threat, queries=100).evaluate(model, x, y)
    assert result.accuracy["boundary"] > result.robust_accuracy and result.backwards["square"] == 0
    assert "zero-gradients" in {warning.name for warning in result.warnings}
    smooth = Quick(threat=linf.threat, queries=100).evaluate(linf.model, x, y)
    assert smooth.forwards["square"] == 0


def test_the_name_sets_the_budget(linf):
    named = attacks.get("quick-steps8-targets3-restarts1-queries50-bf16", threat=linf.threat)
    assert named == Quick(threat=linf.threat, steps=8, targets=3, restarts=1, queries=50, precision="bf16")
    stages = named.stages()
    assert {name: search.variants(10) for name, search in stages.items()} == {
        "first": 1, "restarts": 1, "targets": 3, "deep": 8, "boundary": 3, "square": 1,
    }  # fmt: skip


def test_an_evaluation_reports_that_it_is_quick_and_resumes_after_an_interruption(linf, tmp_path, monkeypatch):
    data, attack = linf.first(40), {"quick": Quick(threat=linf.threat, steps=6, batch_size=18)}
    whole = benchmark(linf.model, data, linf.threat, attack, record=tmp_path / "whole.json")
    assert any("quick estimate" in warning for warning in whole.warnings) and "quick estimate" in str(whole)
    added, add = [], CascadeRecord.add

    def interrupted(self, batch):
        add(self, batch)
        added.append(batch.stage)
        if batch.stage == "targets" and added.count("targets") == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CascadeRecord, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            benchmark(linf.model, data, linf.threat, attack, record=tmp_path / "part.json")
        before = added.copy()
        resumed = benchmark(linf.model, data, linf.threat, attack, record=tmp_path / "part.json")
    assert added[: len(before)] == before and "first" not in added[len(before) :] and "targets" in added[len(before) :]
    assert torch.equal(resumed.robust["default"]["quick"], whole.robust["default"]["quick"])
    assert resumed.record()["stages"] == whole.record()["stages"]


def test_the_boundary_is_sought_from_the_best_point_of_the_stages_before(linf, monkeypatch):
    x, y = linf.first(20)
    attack, search = Quick(threat=linf.threat, steps=6, near=1), APGD.search
    started = list[tuple[int, bool]]()

    def watched(self, victim, x, y, noise, *, start=None):
        started.append((self.steps, start is not None and not torch.equal(start, x)))
        return search(self, victim, x, y, noise, start=start)

    monkeypatch.setattr(APGD, "search", watched)
    attack.evaluate(linf.model, x, y)
    assert {steps for steps, continued in started if continued} == {12}, "the stage `boundary` takes 2 · 6 steps"
    assert all(continued for steps, continued in started if steps == 12)
