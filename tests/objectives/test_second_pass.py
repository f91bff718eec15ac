"""APART and APART-SAM are algorithm 1 of paper B; the second pass changes nothing but the gradient."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm.norms import zero_perturbation
from advnorm.norms.routed_module import routed_modules
from advnorm.norms.state import UNSCOPED
from advnorm.objectives import APART, APARTSAM, SECOND_PASSES, Hybrid, Objective, Standard
from support.norm_oracles import changed, snapshot, statistics_names
from support.objective_oracles import Given, Tiny, crafted, images, pgd, tiny
from support.problems import raises_problem
from support.second_pass_oracles import (
    EXACT,
    INDEX,
    PASSES,
    M,
    X,
    Y,
    agree,
    algorithm_1,
    drawn_rows,
    each_case,
    each_pass,
    equation_7,
    hybrid,
    seen_by,
    some_cases,
)


@pytest.mark.parametrize(("samples", "groups", "count"), [(0.5, 1, 4), (6, 3, 6)])
@each_case
def test_a_step_of_apart_is_algorithm_1(inner, norm, samples, groups, count):
    model = tiny(norm)
    before = copy.deepcopy(model)
    objective = APART(inner.objective(model), radius=0.1, samples=samples, groups=groups)
    passes = seen_by(objective.objective)
    step = objective(X, Y, index=INDEX)
    rows = drawn_rows(passes)
    assert len(rows) == count
    expected = algorithm_1(before, inner.loss, (X, crafted(X), Y), rows, groups=groups, radius=0.1)
    assert not torch.allclose(expected.first, expected.second, rtol=1e-3)
    agree(step, model, expected, count / (M + count))


@each_case
def test_a_step_of_apart_sam_moves_the_weights_by_equation_7_too(inner, norm):
    model = tiny(norm)
    before = copy.deepcopy(model)
    objective = APARTSAM(inner.objective(model), rho=0.3, radius=0.1, samples=4, groups=2)
    passes = seen_by(objective.objective)
    step = objective(X, Y, index=INDEX)
    batch, rows = (X, crafted(X), Y), drawn_rows(passes)
    expected = algorithm_1(before, inner.loss, batch, rows, groups=2, radius=0.1, move=equation_7(0.3))
    unmoved = algorithm_1(before, inner.loss, batch, rows, groups=2, radius=0.1)
    assert abs(expected.second - unmoved.second) > 1e-3
    agree(step, model, expected, 4 / (M + 4))


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    rho=st.sampled_from([0.0, 0.05, 0.5]),
    radius=st.sampled_from([0.0, 0.05, 0.4]),
    groups=st.integers(1, 4),
    per_group=st.integers(2, 4),
    extra=st.integers(0, 4),
    seed=st.integers(0, 99),
    norm=st.sampled_from(["bn", "dual_bn", "cross_bn", "gmm_bn"]),
)
def test_any_radius_number_and_grouping_is_algorithm_1(rho, radius, groups, per_group, extra, seed, norm):
    count, size = groups * per_group, groups * per_group + extra
    size = max(size, 2)
    x, y = images(size, seed=seed)
    inner, model = hybrid("concatenated"), tiny(norm, seed=seed)
    before = copy.deepcopy(model)
    objective = APARTSAM(inner.objective(model), rho=rho, radius=radius, samples=count, groups=groups)
    passes = seen_by(objective.objective)
    step = objective(x, y, index=torch.arange(size) + 1000)
    rows = drawn_rows(passes)
    expected = algorithm_1(
        before, inner.loss, (x, crafted(x), y), rows, groups=groups, radius=radius, move=equation_7(rho)
    )
    assume(not expected.ambiguous)
    agree(step, model, expected, count / (size + count))


def test_at_radius_0_and_with_the_whole_batch_apart_is_the_objective_itself():
    """Paper B, eq. 4."""
    plain, model = tiny("dual_bn"), tiny("dual_bn")
    alone = hybrid("concatenated").objective(plain)(X, Y)
    step = APART(hybrid("concatenated").objective(model), radius=0.0)(X, Y)
    alone.loss.backward()
    step.loss.backward()
    torch.testing.assert_close(step.loss, alone.loss, **EXACT)
    for a, b in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)
    assert {k: v for k, v in step.terms.items() if k != "second_pass"}.keys() == alone.terms.keys()
    torch.testing.assert_close(step.logits, alone.logits, **EXACT)
    assert torch.equal(step.labels["adv"], alone.labels["adv"])


@settings(deadline=None, max_examples=25, derandomize=True)
@given(samples=st.one_of(st.integers(2, 40), st.floats(0.01, 1.0)), groups=st.integers(1, 8), batch=st.integers(8, 40))
def test_the_second_pass_takes_as_many_images_as_fit_into_equal_groups(samples, groups, batch):
    if isinstance(samples, int) and samples % groups:
        samples *= groups
    objective = APART(Standard(tiny()), samples=samples, groups=groups)
    wanted = min(batch, samples if isinstance(samples, int) else round(samples * batch))
    if wanted < groups:
        with raises_problem("conflict", "samples"):
            objective.rows(batch)
        return
    rows = objective.rows(batch)
    assert rows % groups == 0 and groups <= rows <= batch
    assert wanted - groups < rows <= wanted
    assert objective.share(batch) == rows / (batch + rows) <= 0.5


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_with_fewer_images_than_groups_is_rejected_before_any_bank_is_updated(count):
    objective = APART(Standard(tiny()), groups=4)
    before = snapshot(objective.model)
    with raises_problem("conflict", "samples"):
        objective(X[:count], Y[:count])
    assert changed(objective.model, before) == set()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_a_number_of_samples_is_that_of_all_processes_together(monkeypatch, processes):
    """N/(M+N) is the share of the second pass however many processes have parts of the batch (trap 12)."""
    monkeypatch.setattr("advnorm.objectives.second_pass.world_size", lambda: processes)
    objective = APART(Standard(tiny()), samples=16)
    assert objective.rows(64 // processes) == 16 // processes and objective.share(64 // processes) == 0.2
    assert APART(Standard(tiny()), samples=0.25).share(64 // processes) == 0.2
    if processes > 1:
        with raises_problem("conflict", "samples"):
            APART(Standard(tiny()), samples=17).rows(64 // processes)


def test_every_image_is_drawn_equally_often_and_each_draw_belongs_to_the_images_alone():
    objective = APART(Standard(tiny()), samples=4)
    passes = seen_by(objective.objective)
    counts = torch.zeros(M)
    for epoch in range(200):
        index = torch.arange(M) + epoch * M
        objective(X, Y, index=index)
        counts[passes[-1].index - epoch * M] += 1
        del passes[:]
    expected = 200 * 4 / M
    assert counts.sum() == 800 and float(((counts - expected) ** 2 / expected).sum()) < 24.3  # χ², 7 degrees, p = 0.001
    order = torch.randperm(M)
    for x, y, index in ((X, Y, INDEX), (X[order], Y[order], INDEX[order])):
        objective(x, y, index=index)
    assert torch.equal(passes[1].index, passes[3].index) and torch.equal(passes[1].x, passes[3].x)
    torch.testing.assert_close(passes[1].y, Y[passes[1].index - 1000])


class Counted(torch.autograd.Function):
    """The identity, that notes which backward pass came through."""

    passes: set[int] = set()  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.passes.add(torch._C._current_graph_task_id())
        return grad


class Watched(Tiny):
    """Tiny that counts backward passes and forwards, and fails in a forward of choice."""

    forwards, fails_at, error = 0, None, RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if self.forwards == self.fails_at:
            raise self.error("in the middle")
        return Counted.apply(super().forward(x))


def watched(norm: str, **options: Any) -> Watched:
    model = tiny(norm, **options)
    model.__class__ = Watched
    Counted.passes.clear()
    return model


class Counting(nn.Module):
    """Counts its forwards in place in one buffer, and puts a new tensor into another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.in_place += 1
        self.replaced = self.replaced + 1
        return self.inner(x)


def test_other_buffers_keep_the_values_of_the_first_pass():
    model = Counting(tiny("bn"))
    advnorm.objectives.SAM(Standard(model))(X, Y).loss.backward()
    assert (model.in_place.item(), model.replaced.item()) == (1, 1)


def test_every_registered_second_pass_is_covered_here():
    assert set(PASSES) == set(SECOND_PASSES.names())


@each_pass
@some_cases
def test_a_step_takes_two_backward_passes_and_none_in_the_outer_one(inner, norm, wrap):
    model = watched(norm)
    step = wrap(inner.objective(model))(X, Y)
    assert len(Counted.passes) == 2
    per_pass = 2 if inner.options.get("layout") == "sequential" else 1
    assert model.forwards == 2 * per_pass
    assert all(p.grad is None for p in model.parameters())
    step.loss.backward()
    assert len(Counted.passes) == 2 and any(p.grad is not None for p in model.parameters())


@each_pass
def test_the_images_are_attacked_once_per_step(wrap):
    model = watched("dual_bn")
    wrap(Hybrid(model, pgd(steps=3)))(X, Y)
    assert model.forwards == 3 + 2 and len(Counted.passes) == 3 + 2


def first_pass(objective: Objective, model: nn.Module) -> Any:
    """What the first pass of a wrapper runs under: θ = 0 is there to be differentiated."""
    at_zero = isinstance(objective, APART)
    return advnorm.statistics(model, perturbation=zero_perturbation(model)) if at_zero else nullcontext()


@each_pass
@some_cases
def test_statistics_are_those_of_the_first_pass_bit_for_bit_and_parameters_their_own(inner, norm, wrap):
    model = tiny(norm)
    alone, start = copy.deepcopy(model), snapshot(model)
    objective = wrap(inner.objective(model))
    objective(X, Y).loss.backward()
    with first_pass(objective, alone):
        inner.objective(alone)(X, Y)
    assert changed(model, snapshot(alone)) == set()
    assert statistics_names(list(changed(model, start))) == changed(model, start) != set()
    assert all(module.state is UNSCOPED for module in routed_modules(model).values())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@each_pass
def test_a_second_pass_that_fails_leaves_parameters_flags_and_statistics_as_they_should_be(wrap, error):
    model, alone = watched("bn"), watched("bn")
    flags = [module.training for module in model.modules()]
    model.fails_at, model.error = 2, error
    objective = wrap(Standard(model))
    with pytest.raises(error, match="in the middle"):
        objective(X, Y)
    with first_pass(objective, alone):
        Standard(alone)(X, Y)
    assert changed(model, snapshot(alone)) == set()
    assert [module.training for module in model.modules()] == flags
    assert all(module.state is UNSCOPED for module in routed_modules(model).values())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    model.fails_at = None
    objective(X, Y).loss.backward()


@each_pass
def test_the_second_pass_updates_no_bank_inside_a_scope_that_names_the_mode(wrap):
    """``advnorm.statistics(model, mode="batch")`` around a step says what train mode says: statistics of the batch."""
    model, named = tiny("bn"), tiny("bn")
    wrap(Standard(model))(X, Y)
    with advnorm.statistics(named, mode="batch"):
        wrap(Standard(named))(X, Y)
    assert changed(named, snapshot(model)) == set()


@each_pass
def test_training_on_stored_statistics_updates_no_bank_in_either_pass(wrap):
    model = tiny("dual_bn")
    before = snapshot(model)
    step = wrap(Hybrid(model, Given(), statistics="running"))(X, Y)
    step.loss.backward()
    assert changed(model, before) == set() and model.norm1.weight_adv.grad.abs().sum() > 0


@each_pass
def test_a_norm_in_eval_mode_stays_frozen(wrap):
    """The second pass normalizes with its stored statistics, as the first does."""
    model = tiny("bn")
    model.norm1.eval()
    before = snapshot(model)
    objective = wrap(Standard(model))
    modes = []
    moments = model.norm1._batch_moments
    model.norm1._batch_moments = lambda *args: modes.append(args) or moments(*args)
    objective(X, Y).loss.backward()
    assert {name.partition(".")[0] for name in changed(model, before)} == {"norm2"}
    assert modes == [] and not model.norm1.training and model.norm2.training


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("wrap", [PASSES["sam"], PASSES["awp"]], ids=["sam", "awp"])
def test_built_in_norms_keep_the_statistics_of_the_first_pass(wrap, kind):
    model = tiny(plain=True)
    if kind == "instance":
        model.norm1 = nn.InstanceNorm2d(4, affine=True, track_running_stats=True).double()
        model.norm2.eval()
    alone = copy.deepcopy(model)
    objective = wrap(Standard(model))
    objective(X, Y).loss.backward()
    Standard(alone)(X, Y)
    assert changed(model, snapshot(alone)) == set()
    assert model.norm1.track_running_stats and model.norm1.running_mean is not None
    assert model.norm1.training and model.norm2.training == (kind == "batch")
