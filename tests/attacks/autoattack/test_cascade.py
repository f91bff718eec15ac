"""The cascade: a surrogate that guides the search, batches of few sizes, and memory that runs out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from advnorm._core.errors import AdvnormError
from advnorm._core.memory import AdaptiveBatchSize
from advnorm.attacks.autoattack.cascade import _padded
from advnorm.attacks.search import CandidateGrid
from support.autoattack_models import Double, Wrapped, overflowing, quick, same
from support.problems import raises_problem


def test_strict_forwards_on_a_gpu_have_few_sizes_and_none_above_the_batch_size():
    sizes = []

    def predict(x):
        sizes.append(len(x))
        return 2 * x

    memory = AdaptiveBatchSize(100)
    forward = _padded(predict, memory, searches=False)
    x = torch.rand(120, 3, requires_grad=True)
    for rows in (1, 5, 31, 33, 97):
        assert torch.equal(forward(x[:rows]), 2 * x[:rows])
    memory.size = 3
    assert torch.equal(forward(x[:3]), 2 * x[:3])
    assert sizes == [1, 8, 32, 64, 100, 3]
    (gradient,) = torch.autograd.grad(forward(x[:5]).sum(), x)
    assert torch.equal(gradient[:5], torch.full((5, 3), 2.0)) and not gradient[5:].any()
    forward = _padded(predict, AdaptiveBatchSize(800), searches=True)  # fewer sizes: kernels are tried for each
    sizes.clear()
    for rows in (60, 70, 101, 700, 790):
        forward(torch.rand(rows, 3))
    assert sizes == [64, 100, 200, 700, 800]


def test_a_surrogate_guides_the_search_but_does_not_decide(linf):
    x, y = linf.first(60)

    def confused(x: Tensor) -> Tensor:  # knows half of the images wrongly
        return linf.model(x) + 5 * torch.nn.functional.one_hot((x.flatten(1).sum(1) * 1000).long() % 10, 10)

    result = quick(linf.threat).evaluate(linf.model, x, y, search=confused)
    assert torch.equal(linf.model(result.x_adv).argmax(1) == y, result.robust)
    exact = quick(linf.threat).evaluate(linf.model, x, y)
    assert (exact.robust <= result.robust).double().mean() > 0.95  # a bad guide finds less, and invents nothing


def test_a_surrogate_that_overflows_for_one_image_changes_no_other_result(linf):
    x, y = linf.first(100)
    brightest = x[:60].mean((1, 2, 3)).max()
    strict = quick(linf.threat).evaluate(linf.model, x, y)
    search = overflowing(linf.model, lambda x: (x.mean((1, 2, 3)) - brightest).abs() < 1e-6)
    result = quick(linf.threat).evaluate(linf.model, x, y, search=search)
    assert strict.robust_accuracy < strict.clean_accuracy - 0.05
    assert (result.robust != strict.robust).sum() <= 1


def test_where_a_surrogate_returns_nan_the_model_itself_decides(linf):
    x, y = linf.first(200)
    right = linf.model(x).argmax(1) == y
    x, y = x[right], y[right]
    # Half of the images that fall, none of which the search can see.
    fallen = (~quick(linf.threat).evaluate(linf.model, x, y).robust).nonzero()[::2, 0]
    hidden = x[fallen].flatten(1)

    def unseen(points: Tensor) -> Tensor:
        return (points.flatten(1)[:, None] - hidden).abs().amax(2).amin(1) <= linf.threat.eps

    result = quick(linf.threat).evaluate(linf.model, x, y, search=overflowing(linf.model, unseen))
    assert torch.equal(linf.model(result.x_adv).argmax(1) == y, result.robust)
    assert len(fallen) >= 8 and (~result.robust[fallen]).sum() >= len(fallen) - 1


def test_a_class_with_logit_minus_infinity_works_with_a_fast_search_and_a_record(linf, tmp_path):
    x, y = linf.first(100)
    masked = Wrapped(linf.model, after=lambda z: z.index_fill(1, torch.tensor([9]), -torch.inf))
    assert (y == 9).any()
    strict, fast = (quick(linf.threat, precision=p).evaluate(masked, x, y) for p in ("float32", "bf16"))
    assert strict.robust_accuracy < strict.clean_accuracy - 0.05
    assert abs(fast.robust_accuracy - strict.robust_accuracy) <= 0.02
    for _ in range(2):  # written, and read
        assert same(quick(linf.threat).evaluate(masked, x, y, record=tmp_path / "record"), strict)
    noisy = Wrapped(masked, before=lambda x: x + 0.05 * torch.randn_like(x))
    result = quick(linf.threat).evaluate(noisy, *linf.first(40))
    assert "randomized" in [warning.name for warning in result.warnings]


def test_a_surrogate_without_finite_logits_raises_or_is_left_out(linf):
    x, y = linf.first(30)
    with raises_problem("not_finite", "search"):
        quick(linf.threat).evaluate(
            linf.model, x, y, search=overflowing(linf.model, lambda x: x.flatten(1).mean(1) >= 0)
        )
    short = Wrapped(linf.model, after=lambda z: z * torch.nan if torch.is_autocast_enabled("cpu") else z)
    result = quick(linf.threat, precision="bf16").evaluate(short, x, y)
    assert [flag.name for flag in result.warnings] == ["float32-search"]
    assert same(result, quick(linf.threat).evaluate(linf.model, x, y))


class Cramped(nn.Module):
    """Out of memory above a batch of ``most``."""

    def __init__(self, model: nn.Module, most: int) -> None:
        super().__init__()
        self.model, self.most = model, most

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most:
            raise torch.OutOfMemoryError(f"CUDA out of memory (batch of {len(x)})")
        return self.model(x)


@pytest.mark.parametrize("most", [1, 5, 40])
def test_the_batch_is_halved_until_it_fits(linf, most, tmp_path):
    double, (x, y) = Double(linf.model), linf.first(16 if most < 40 else 60)
    expected = quick(linf.threat).evaluate(double, x, y)
    result = quick(linf.threat).evaluate(Cramped(double, most), x, y, record=tmp_path / "record")
    assert same(result, expected)
    assert result.batch_size <= most and result.halved and min(result.halved) > most
    assert json.loads((tmp_path / "record/record.json").read_text())["answer"]["result"]["halved"] == [*result.halved]


def test_a_single_image_that_does_not_fit_raises(linf):
    with raises_problem("out_of_memory", kind=AdvnormError):
        quick(linf.threat).evaluate(Cramped(linf.model, 0), *linf.first(4))


def test_memory_that_runs_out_beside_the_model_halves_the_batch_too(linf, monkeypatch):
    x, y = linf.first(20)
    expected = quick(linf.threat).evaluate(Double(linf.model), x, y)
    original = CandidateGrid.__init__

    def cramped(self, victim, threat, x, *others, **settings):
        if len(x) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        original(self, victim, threat, x, *others, **settings)

    monkeypatch.setattr(CandidateGrid, "__init__", cramped)
    result = quick(linf.threat).evaluate(Double(linf.model), x, y)
    assert same(result, expected) and result.halved
