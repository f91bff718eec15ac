"""APART, SAM, APART-SAM and AWP against paper B's algorithm 1 by hand, and what a second pass must leave alone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.analysis.statistics_perturbation import StatisticsPerturbation
from advnorm.data.digits import digits
from advnorm.norms import zero_perturbation
from advnorm.norms.routed_module import routed_modules
from advnorm.norms.state import UNSCOPED
from advnorm.objectives import (
    APART,
    APARTSAM,
    AWP,
    LIGS,
    OBJECTIVES,
    SAM,
    SECOND_PASSES,
    CraftedBatch,
    Execution,
    Hybrid,
    Objective,
    ObjectiveOutput,
    Standard,
)
from advnorm.objectives.ligs import shift_images
from advnorm.training.averaging import EMA
from support import second_pass_ranks
from support.digits_training import batches, train
from support.norm_oracles import Oracle, changed, snapshot, statistics_names
from support.objective_oracles import (
    Given,
    Network,
    Tiny,
    crafted,
    cross_entropy,
    forwards,
    images,
    kl,
    pgd,
    routed,
    tiny,
)
from support.objective_ranks import STEPS, WORLD, data, descend
from support.problems import raises_problem

M = 8
X, Y = images(M)
INDEX = torch.arange(M) + 1000
EXACT = {"rtol": 1e-9, "atol": 1e-11}

# -- the oracle ---------------------------------------------------------------------------------------------------

Batch = tuple[Tensor, Tensor, Tensor]  # clean, adversarial, labels
Loss = Callable[["Attacked", Batch, str], Tensor]
Gradients = dict[str, Tensor]


class PerturbedNorm(Oracle):
    """A norm by hand whose statistics are perturbed by ``theta`` (paper B, eq. 3)."""

    def __init__(self, norm: Any) -> None:
        super().__init__(norm.plan.name, norm)
        banks = ("shared",) if self.row.statistics == "mixed" else self.domains
        self.theta = {bank: self._zeros() for bank in banks}

    def _zeros(self) -> tuple[Tensor, Tensor]:
        return tuple(torch.zeros(self.channels, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def forward(self, x: Tensor, counts: Any, *, mode: str = "batch", **_: Any) -> Tensor:
        return super().forward(x, counts, mode=mode, deltas=self.theta)


class Attacked(Network):
    """The network by hand with the adversarial parameters θ of its norms."""

    def __init__(self, model: Tiny) -> None:
        super().__init__(model)
        self.norms = {name: PerturbedNorm(routed(getattr(model, name))) for name in ("norm1", "norm2")}

    @property
    def theta(self) -> list[Tensor]:
        return [delta for norm in self.norms.values() for pair in norm.theta.values() for delta in pair]


def gradient(value: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(value, list(tensors), allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(tensors, found)]


@dataclass(frozen=True)
class Expected:
    first: Tensor
    second: Tensor
    gradients: Gradients
    buffers: dict[str, Tensor]
    ambiguous: bool = False  # whether a derivative is 0 but for rounding, so that its sign is arbitrary


def algorithm_1(
    model: Tiny,
    loss: Loss,
    batch: Batch,
    drawn: Tensor,
    *,
    groups: int = 1,
    radius: float = 0.0,
    move: Callable[[dict[str, Tensor], Gradients], Gradients] | None = None,
    share: float | None = None,
) -> Expected:
    """Paper B, algorithm 1, line by line, with g_φ in line 12; ``move`` says how far each φ goes (eq. 7)."""
    network = Attacked(model)
    names, phi, theta = list(network.parameters), list(network.parameters.values()), network.theta  # line 1
    first = loss(network, batch, "batch")  # lines 2 to 4
    found = gradient(first, [*phi, *theta])
    g_phi, g_theta = found[: len(phi)], found[len(phi) :]
    with torch.no_grad():
        for delta, g in zip(theta, g_theta):  # line 5
            delta.copy_(radius * ((g > 0).double() - (g < 0).double()))
        if move is not None:
            steps = move(network.parameters, dict(zip(names, g_phi)))
            for name, value in network.parameters.items():
                value += steps[name]
    h_phi, second = [torch.zeros_like(p) for p in phi], 0.0  # line 8
    size = len(drawn) // groups
    for j in range(groups):  # lines 7, 9, 10
        rows = drawn[j * size : (j + 1) * size]
        part = loss(network, tuple(value[rows] for value in batch), "batch_frozen")
        h_phi = [h + g / groups for h, g in zip(h_phi, gradient(part, phi))]
        second = second + part.detach() / groups
    big_n = len(drawn)
    r = big_n / (len(batch[0]) + big_n) if share is None else share
    total = {name: (1 - r) * g + r * h for name, g, h in zip(names, g_phi, h_phi)}  # line 12
    sizes = torch.cat([g.abs().flatten() for g in g_theta]) if g_theta else torch.ones(1)
    ambiguous = bool(((sizes > 0) & (sizes < 1e-12)).any())
    return Expected(first.detach(), second, total, network.buffers, ambiguous)


def equation_7(rho: float, p: float = 2.0) -> Callable[[dict[str, Tensor], Gradients], Gradients]:
    """``ρ sign(g) |g|^(q-1) / (||g||_q^q)^(1/p)`` over all parameters together, with 1/p + 1/q = 1."""
    q = p / (p - 1)

    def steps(_: dict[str, Tensor], g: Gradients) -> Gradients:
        total = sum((value.abs() ** q).sum() for value in g.values())
        return {name: rho * value.sign() * value.abs() ** (q - 1) / total ** (1 / p) for name, value in g.items()}

    return steps


def wu(gamma: float, *, norms: bool) -> Callable[[dict[str, Tensor], Gradients], Gradients]:
    """Wu et al. (2020): each weight moves by γ of its own length; what is a weight is spelled out for the network."""
    moved = {"conv1.weight", "conv2.weight", "fc.weight"}

    def steps(w: dict[str, Tensor], g: Gradients) -> Gradients:
        of_norms = {name for name in w if norms and name.startswith("norm") and ".weight" in name}
        return {
            name: gamma * (value**2).sum() ** 0.5 * g[name] / (g[name] ** 2).sum() ** 0.5
            if name in moved | of_norms and g[name].any()  # a branch that is not trained has none
            else torch.zeros_like(value)
            for name, value in w.items()
        }

    return steps


def on_one(domain: str) -> Loss:
    def loss(network: Attacked, batch: Batch, mode: str) -> Tensor:
        x = {"clean": batch[0], "adv": batch[1]}[domain]
        return cross_entropy(network.forward({domain: x}, mode=mode)[domain], batch[2]).mean()

    return loss


def on_both(layout: str, kind: str) -> Loss:
    def loss(network: Attacked, batch: Batch, mode: str) -> Tensor:
        x, x_adv, y = batch
        network.likelihoods.clear()
        out = forwards(network, x, x_adv, layout=layout, mode=mode)
        clean, adv = out["clean"], out["adv"]
        if kind == "trades":
            return (cross_entropy(clean, y) + 6 * kl(clean, adv)).mean()
        total = (0.3 * cross_entropy(clean, y) + 0.7 * cross_entropy(adv, y)).mean()
        return total + 0.01 * torch.stack(network.likelihoods).sum() if kind == "likelihood" else total

    return loss


@dataclass(frozen=True)
class Inner:
    """An objective to wrap, and its loss by hand."""

    name: str
    options: dict[str, Any]
    loss: Loss

    def objective(self, model: nn.Module) -> Objective:
        return OBJECTIVES.get(self.name)(model, None if self.name == "standard" else Given(), **self.options)


STANDARD = Inner("standard", {}, on_one("clean"))
CLASSICAL = Inner("classical", {}, on_one("adv"))


def hybrid(layout: str) -> Inner:
    return Inner("hybrid", {"layout": layout, "clean_weight": 0.3}, on_both(layout, "hybrid"))


def trades(layout: str) -> Inner:
    return Inner("trades", {"layout": layout}, on_both(layout, "trades"))


LIKELIHOOD = Inner("hybrid", {"clean_weight": 0.3, "likelihood_weight": 0.01}, on_both("concatenated", "likelihood"))
CASES = {
    **{f"standard-{norm}": (STANDARD, norm) for norm in ("bn", "dual_bn")},
    **{f"classical-{norm}": (CLASSICAL, norm) for norm in ("bn", "dual_bn")},
    **{
        f"{make.__name__}-{norm}-{layout}": (make(layout), norm)
        for make in (hybrid, trades)
        for layout in ("concatenated", "sequential")
        for norm in ("bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "cross_bn", "gmm_bn")
        if layout == "concatenated" or norm not in ("cross_bn", "gmm_bn")
    },
    "likelihood-gmm_bn": (LIKELIHOOD, "gmm_bn"),
}
each_case = pytest.mark.parametrize(("inner", "norm"), CASES.values(), ids=CASES)
#: Enough of them where the objective inside plays no part.
SOME = ("standard-bn", "classical-dual_bn", "hybrid-dual_bn-sequential", "hybrid-cross_bn-concatenated")
some_cases = pytest.mark.parametrize(("inner", "norm"), [CASES[key] for key in SOME], ids=SOME)


def seen_by(objective: Objective) -> list[CraftedBatch]:
    """What each pass of a wrapper measures its objective on, from now on."""
    passes: list[CraftedBatch] = []
    original = objective.compute_loss

    def recorded(of: CraftedBatch, execution: Execution) -> ObjectiveOutput:
        passes.append(of)
        return original(of, execution)

    objective.compute_loss = recorded  # type: ignore[method-assign]
    return passes


def agree(step: ObjectiveOutput, model: nn.Module, expected: Expected, share: float) -> None:
    """Loss, terms, the gradient of every parameter, and the statistics, which are those of the first pass."""
    torch.testing.assert_close(step.loss.detach(), (1 - share) * expected.first + share * expected.second, **EXACT)
    torch.testing.assert_close(step.terms["second_pass"], expected.second, **EXACT)
    step.loss.backward()
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(expected.gradients)
    for name, wanted in expected.gradients.items():
        own = parameters[name].grad
        own = torch.zeros_like(wanted) if own is None else own
        torch.testing.assert_close(own, wanted, **EXACT, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for name, buffer in model.named_buffers():
        wanted = expected.buffers[name].double()
        torch.testing.assert_close(buffer.double(), wanted, **EXACT, msg=lambda m, name=name: f"{name}: {m}")


def drawn_rows(passes: list[CraftedBatch]) -> Tensor:
    """The rows of the second pass, which must be images of the first with their own labels and counterparts."""
    first, second = passes
    rows = second.index - 1000
    assert len(rows.unique()) == len(rows)
    for whole, part in zip(first, second):
        if whole is not None:
            assert torch.equal(whole[rows], part)
    return rows


# -- APART and APART-SAM ------------------------------------------------------------------------------------------


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
def test_a_batch_with_fewer_images_than_groups_is_refused_before_anything_is_fed(count):
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


# -- two backward passes, and what is left alone ------------------------------------------------------------------


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


PASSES = {
    "apart": lambda inner: APART(inner, radius=0.2, samples=4, groups=2),
    "sam": lambda inner: SAM(inner, rho=0.3),
    "apart_sam": lambda inner: APARTSAM(inner, rho=0.3, radius=0.2, samples=4),
    "awp": lambda inner: AWP(inner, gamma=0.1),
}
each_pass = pytest.mark.parametrize("wrap", PASSES.values(), ids=PASSES)


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
def test_the_second_pass_feeds_nothing_inside_a_scope_that_names_the_mode(wrap):
    """``advnorm.statistics(model, mode="batch")`` around a step says what train mode says: statistics of the batch."""
    model, named = tiny("bn"), tiny("bn")
    wrap(Standard(model))(X, Y)
    with advnorm.statistics(named, mode="batch"):
        wrap(Standard(named))(X, Y)
    assert changed(named, snapshot(model)) == set()


@each_pass
def test_training_on_stored_statistics_feeds_nothing_in_either_pass(wrap):
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
    moments = model.norm1._moments
    model.norm1._moments = lambda *args: modes.append(args) or moments(*args)
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


# -- SAM and AWP --------------------------------------------------------------------------------------------------


def whole_batch(inner: Inner, model: Tiny, move: Callable[..., Gradients]) -> Expected:
    return algorithm_1(model, inner.loss, (X, crafted(X), Y), torch.arange(M), move=move, share=1.0)


@each_case
def test_a_step_of_sam_is_the_gradient_at_the_moved_weights(inner, norm):
    model = tiny(norm)
    expected = whole_batch(inner, model, equation_7(0.3))
    assert abs(expected.second - expected.first) > 1e-2
    agree(SAM(inner.objective(model), rho=0.3)(X, Y), model, expected, 1.0)


@pytest.mark.parametrize("norms", [False, True])
@each_case
def test_a_step_of_awp_moves_each_weight_by_a_share_of_its_length(inner, norm, norms):
    model = tiny(norm)
    expected = whole_batch(inner, model, wu(0.05, norms=norms))
    other = whole_batch(inner, model, wu(0.05, norms=not norms))
    assert abs(expected.second - other.second) > 1e-3
    agree(AWP(inner.objective(model), gamma=0.05, norms=norms)(X, Y), model, expected, 1.0)


@pytest.mark.parametrize("wrap", [PASSES["sam"], PASSES["awp"]], ids=["sam", "awp"])
def test_a_plain_batch_norm_is_the_single_bn(wrap):
    model = tiny(plain=True)
    move = equation_7(0.3) if wrap is PASSES["sam"] else wu(0.1, norms=False)
    expected = whole_batch(STANDARD, model, move)
    agree(wrap(Standard(model))(X, Y), model, expected, 1.0)


@pytest.mark.parametrize("norms", [False, True])
def test_awp_moves_no_bias_and_norms_only_when_told(norms):
    model = tiny("dual_bn", dual_head=True)
    start, inside = snapshot(model), {}
    objective = AWP(Hybrid(model, Given()), gamma=0.1, norms=norms)
    compute_loss, calls = objective.objective.compute_loss, []

    def noted(of: CraftedBatch, execution: Execution) -> ObjectiveOutput:
        calls.append(of)
        if len(calls) == 2:
            inside.update(snapshot(model))
        return compute_loss(of, execution)

    objective.objective.compute_loss = noted  # type: ignore[method-assign]
    objective(X, Y)
    moved = {name for name, p in model.named_parameters() if not torch.equal(inside[name], start[name])}
    weights = {name for name, _ in model.named_parameters() if "weight" in name}
    assert moved == {name for name in weights if norms or not name.startswith("norm")}
    for name in moved:
        step = (inside[name] - start[name]).norm() / start[name].norm()
        assert float(step) == pytest.approx(0.1, rel=1e-9), name


class Indifferent(nn.Module):
    """Logits that no weight changes, though all take part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = advnorm.make_norm("bn", 2)
        self.fc = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)[:, :4] + 0 * self.fc(self.norm(x).mean((2, 3)))


@each_pass
def test_where_there_is_no_gradient_nothing_moves_and_nothing_is_nan(wrap):
    model = Indifferent()
    step = wrap(Standard(model))(X, Y)
    step.loss.backward()
    assert step.loss.isfinite()
    for parameter in model.parameters():
        assert not parameter.grad.isnan().any() and not parameter.grad.any()


class Sometimes(Tiny):
    """Leaves its second convolution's bias out of every second forward, as layers that are dropped at random do."""

    odd = False

    def forward(self, x: Tensor) -> Tensor:
        self.odd = not self.odd
        x = self.norm1(self.conv1(x.to(self.conv1.weight.dtype))).relu()
        x = torch.conv2d(x, self.conv2.weight, self.conv2.bias if self.odd else None)
        return self.fc(self.norm2(x).relu().mean((2, 3)))


@each_pass
def test_a_parameter_that_only_one_of_the_passes_used_is_no_error(wrap):
    model = tiny("bn")
    model.__class__ = Sometimes
    wrap(Standard(model))(X, Y).loss.backward()
    assert model.conv2.weight.grad.isfinite().all()


def test_awp_takes_a_slope_for_no_weight():
    """Weights of one dimension outside of norms, here a PReLU's, are none of a convolution or linear layer."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.PReLU(8), nn.Linear(8, 4))
    objective, seen = AWP(Standard(model), gamma=0.1, norms=True), []
    model[3].register_forward_pre_hook(lambda *_: seen.append([p.detach().clone() for p in model.parameters()]))
    objective(X, Y)
    assert [not torch.equal(a, b) for a, b in zip(*seen)] == [True, False, False, True, False]


@pytest.mark.parametrize("parametrization", ["weight_norm", "spectral_norm"])
def test_awp_moves_parametrized_weights(parametrization):
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 4))
    getattr(nn.utils.parametrizations, parametrization)(model[1])
    step = AWP(Standard(model), gamma=0.5)(X, Y)
    moved = {id(p) for p in AWP(Standard(model))._perturbed_weights()}
    originals = [p for name, p in model[1].named_parameters() if "original" in name]
    assert originals and {id(p) for p in originals if p.dim() > 1} < moved
    assert float(step.terms["second_pass"] - step.terms["clean_ce"]) > 0.01


def test_awp_that_would_move_nothing_is_refused():
    model = tiny()
    for parameter in (model.conv1.weight, model.conv2.weight, model.fc.weight):
        parameter.requires_grad_(False)
    with raises_problem("empty", "model"):
        AWP(Standard(model))
    AWP(Standard(model), norms=True)(X, Y).loss.backward()


@each_pass
def test_hooks_on_parameters_run_once_on_the_gradient_of_the_step(wrap):
    model, hooked = tiny(), tiny()
    calls = []
    handle = hooked.conv1.weight.register_hook(lambda grad: calls.append(1) or grad * 0.5)
    for network in (model, hooked):
        wrap(Standard(network))(X, Y, index=INDEX).loss.backward()
    assert len(calls) == 1
    torch.testing.assert_close(hooked.conv1.weight.grad, 0.5 * model.conv1.weight.grad, **EXACT)
    torch.testing.assert_close(hooked.conv2.weight.grad, model.conv2.weight.grad, **EXACT)
    handle.remove()


class Fed(nn.Module):
    """Buffers that a forward changes: one in place, one put in the place of the old."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3)).double()
        return x * (1 + 0 * self.mean[:, None, None]).to(x.dtype)


@pytest.mark.parametrize("wrap", [*PASSES.values(), LIGS], ids=[*PASSES, "ligs"])
def test_buffers_of_any_module_are_those_of_the_objective_alone(wrap):
    models = [nn.Sequential(Fed(), tiny()) for _ in range(2)]
    wrap(Standard(models[0]))(X, Y, index=INDEX).loss.backward()
    Standard(models[1])(X, Y, index=INDEX)
    assert changed(models[0][0], snapshot(models[1][0])) == set() and models[0][0].seen == 1


@each_pass
def test_without_gradients_the_reason_is_told(wrap):
    objective = wrap(Standard(tiny()))
    with torch.no_grad(), pytest.raises(ConfigError, match=r"torch.no_grad\(\) is on"):
        objective(X, Y)
    objective.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter takes a gradient"):
        objective(X, Y)


def test_apart_leaves_norms_of_single_samples_alone():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(64, 4))
    advnorm.convert_norm(model, "bn")
    step = APART(Standard(model))(X.float(), Y)
    step.loss.backward()
    assert float(step.terms["second_pass"]) > float(step.terms["clean_ce"])


def test_what_an_objective_is_says_all_that_is_around_it():
    objective = APARTSAM(LIGS(Standard(tiny()), weight=0.5), rho=0.1)
    assert objective.class_names == ("APARTSAM", "LIGS", "Standard")
    for part in ("APARTSAM(", "rho=0.1", "LIGS(Standard(", "weight=0.5"):
        assert part in objective.describe()


class Checkpointed(Tiny):
    """Tiny that recomputes its features in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        context = advnorm.checkpoint_context(self)
        x = checkpoint(self.features, x.to(self.conv1.weight.dtype), use_reentrant=False, context_fn=context)
        return self.fc(x.mean((2, 3)))

    def features(self, x: Tensor) -> Tensor:
        return self.norm2(self.conv2(self.norm1(self.conv1(x)).relu())).relu()


@each_pass
def test_gradient_checkpointing_repeats_each_pass_as_it_was(wrap):
    model, alone = tiny("dual_bn"), tiny("dual_bn")
    model.__class__ = Checkpointed
    for each in (model, alone):
        wrap(Hybrid(each, Given()))(X, Y, index=INDEX).loss.backward()
    assert changed(model, snapshot(alone)) == set()
    for a, b in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)


@each_pass
def test_a_frozen_parameter_neither_moves_nor_learns(wrap):
    model, start = tiny("bn"), {}
    model.conv1.weight.requires_grad_(False)
    start = snapshot(model)
    seen = []
    model.norm1.register_forward_pre_hook(lambda *_: seen.append(model.conv1.weight.clone()))
    wrap(Standard(model))(X, Y).loss.backward()
    assert model.conv1.weight.grad is None and len(seen) == 2
    assert all(torch.equal(weight, start["conv1.weight"]) for weight in seen)


# -- two processes ------------------------------------------------------------------------------------------------

two_processes = [
    pytest.mark.world_size(WORLD),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed"),
]


@pytest.fixture(scope="module")
def ranks(launch_ranks) -> list[dict[str, Any]]:
    """What each rank saw, from one launch of all ranks."""
    return launch_ranks(second_pass_ranks.__file__, WORLD)


def of_case(ranks: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    for rank, results in enumerate(ranks):
        assert "error" not in results[key], f"rank {rank}: {results[key]['trace']}"
    return [results[key] for results in ranks]


@pytest.mark.parametrize("key", [pytest.param(key, marks=two_processes) for key in second_pass_ranks.CASES])
def test_two_ranks_train_as_one_process_on_the_whole_batch(ranks, key):
    """The attack on the model is that of the whole batch, on every rank the same."""
    case, found = second_pass_ranks.CASES[key], of_case(ranks, key)
    near = {"rtol": 1e-5, "atol": 1e-7} if case.ligs else EXACT  # the gradient of a float32 image is float32
    objective = case.objective(sync=False)
    before = snapshot(objective.model)
    losses = descend(objective, [data(step) for step in range(STEPS)])
    mean = [sum(pair) / WORLD for pair in zip(*(result["losses"] for result in found))]
    assert mean == pytest.approx(losses, rel=near["rtol"])
    assert "conv1.weight" in changed(objective.model, before)
    for result in found:
        for name, value in objective.model.state_dict().items():
            torch.testing.assert_close(result["state"][name], value, **near, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("key", [pytest.param(key, marks=two_processes) for key in second_pass_ranks.CASES])
def test_a_step_reduces_the_gradients_once_and_adds_a_mean_per_attack_on_the_model(ranks, key):
    case = second_pass_ranks.CASES[key]
    for result in of_case(ranks, key):
        assert result["calls"] == {"bucket": STEPS, "all_reduce": STEPS * (2 * case.forwards + case.means)}


@pytest.mark.world_size
def test_a_bank_that_no_image_takes_is_no_error_under_ddp(ranks):
    """``find_unused_parameters`` looks for parameters in the graph of all that a step returns."""
    for key in second_pass_ranks.UNUSED:
        for rank, results in enumerate(ranks):
            assert "error" not in results[key], f"rank {rank}: {results[key]['trace']}"


# -- bf16, moving averages, resuming ------------------------------------------------------------------------------


def bf16(**options: Any) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, **options)


def in_float32(norm: str = "bn") -> Tiny:
    return tiny(norm).float()


@pytest.mark.parametrize("name", ["sam", "awp"])
def test_under_autocast_the_second_pass_uses_the_moved_weights(name):
    """Autocast keeps the halves of weights that it made once; those of the first pass must not serve the second."""
    model, twin = in_float32(), in_float32()
    wrap = PASSES[name]
    with bf16():
        model.eval()(X)  # the cache is warm
        step = wrap(Standard(model.train()))(X, Y)
    with bf16(cache_enabled=False):
        first = Standard(twin)(X, Y).loss
    objective = wrap(Standard(twin))
    parameters = list(twin.parameters())
    with torch.no_grad():
        for parameter, moved in zip(
            parameters, objective.weight_perturbations(parameters, torch.autograd.grad(first, parameters))
        ):
            parameter += moved
    with bf16(cache_enabled=False), advnorm.statistics(twin, mode="batch_frozen"):
        fresh = Standard(twin)(X, Y).loss.detach()
    assert torch.equal(step.terms["second_pass"], fresh)
    assert abs(float(fresh - first)) > 0.02


@each_pass
@pytest.mark.parametrize("cache", [True, False])
def test_under_autocast_a_later_forward_uses_the_weights_of_the_model_again(wrap, cache):
    model = in_float32()
    with bf16(cache_enabled=cache):
        step = wrap(Standard(model))(X, Y)
        model.eval()
        after = model(X)
    with bf16():
        assert torch.equal(model(X), after)
    step.loss.backward()
    assert all(p.grad is None or (p.grad.dtype == p.dtype and p.grad.isfinite().all()) for p in model.parameters())


@each_pass
def test_bf16_gradients_are_near_those_of_float32(wrap):
    def gradients(scope: Any) -> Tensor:
        model = in_float32("dual_bn")
        with scope:
            step = wrap(Hybrid(model, Given()))(X, Y, index=INDEX)
        step.loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    exact, half = gradients(bf16(enabled=False)), gradients(bf16())
    assert float(torch.cosine_similarity(exact, half, dim=0)) > 0.98


@each_pass
def test_a_scaled_loss_scales_the_gradient(wrap):
    one, other = tiny(), tiny()
    wrap(Standard(one))(X, Y, index=INDEX).loss.backward()
    (wrap(Standard(other))(X, Y, index=INDEX).loss * 1024).backward()
    for a, b in zip(one.parameters(), other.parameters()):
        assert torch.equal(1024 * a.grad, b.grad)


@each_pass
def test_optimizer_average_and_generators_are_not_touched(wrap):
    model = in_float32()
    objective, ema = wrap(Standard(model)), EMA(model, 0.9)
    optimizer = torch.optim.SGD(objective.parameters(), lr=0.1, momentum=0.9)
    objective(X, Y).loss.backward()
    optimizer.step()
    ema.update(model)
    optimizer.zero_grad()

    def state() -> list[Tensor]:
        momentum = [entry["momentum_buffer"] for entry in optimizer.state.values()]
        return [v.clone() for v in (*momentum, *ema.state_dict()["average"].values(), torch.get_rng_state())]

    before, updates = state(), ema.updates
    objective(X, Y).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, state())) and ema.updates == updates


@each_pass
def test_a_training_continues_from_the_model_alone(wrap):
    """A second pass keeps no state: its state dict is the model's, and a fresh wrapper takes the same steps."""
    model = in_float32("dual_bn")
    objective = wrap(Hybrid(model, pgd()))
    assert {name.removeprefix("objective.model.") for name in objective.state_dict()} == set(model.state_dict())

    def take(objective: Objective, steps: range) -> None:
        for step in steps:
            objective.zero_grad()
            objective(X, Y, index=INDEX + step * M).loss.backward()
            with torch.no_grad():
                for p in objective.parameters():
                    p -= 0.1 * p.grad

    take(objective, range(2))
    resumed = wrap(Hybrid(copy.deepcopy(model), pgd()))
    take(objective, range(2, 4))
    take(resumed, range(2, 4))
    assert changed(resumed.model, snapshot(model)) == set()


# -- composition and refusals -------------------------------------------------------------------------------------


def with_ligs(network: Attacked, batch: Batch, mode: str) -> Tensor:
    """Paper D, eq. 1, on pairs of an image and its neighbour, which takes the place of the adversarial one."""
    x, neighbour, y = batch

    def input_gradient(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        logits = network.forward({"clean": at}, mode="batch_frozen")["clean"]
        return torch.autograd.grad(cross_entropy(logits, y).sum(), at, create_graph=True)[0].flatten(1)

    a, b = input_gradient(x), input_gradient(neighbour)
    ligs = ((a * b).sum(1) / ((a**2).sum(1) * (b**2).sum(1)) ** 0.5).mean()
    return on_one("clean")(network, batch, mode) + 0.5 * (1 - ligs)


@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
@each_pass
def test_a_second_pass_resists_the_regularizer_too(wrap, norm):
    model, x = tiny(norm), X.double()
    neighbour = shift_images("gaussian", x, Y, ImageNoise(0, INDEX).fold("ligs"), 0.2, None)
    before = copy.deepcopy(model)
    objective = wrap(LIGS(Standard(model), weight=0.5, size=0.2))
    passes = seen_by(objective.objective)
    step = objective(x, Y, index=INDEX)
    rows, attack = drawn_rows(passes), {"groups": objective.groups, "radius": objective.radius or 0.0}
    if objective.attacks_weights:
        attack["move"] = wu(0.1, norms=False) if isinstance(objective, AWP) else equation_7(0.3)
    share = objective.share(M)
    expected = algorithm_1(before, with_ligs, (x, neighbour, Y), rows, share=share, **attack)
    assert {"clean_ce", "ligs", "second_pass"} == set(step.terms)
    agree(step, model, expected, share)


@pytest.mark.parametrize("outer", [APART, SAM, APARTSAM, AWP])
@pytest.mark.parametrize("inner", [APART, SAM, APARTSAM, AWP])
def test_two_second_passes_are_refused_with_the_way_to_have_both(outer, inner):
    with raises_problem("conflict", "objective"):
        outer(inner(Standard(tiny())))


@pytest.mark.parametrize("inner", [APART, SAM, APARTSAM, AWP])
def test_a_regularizer_around_a_second_pass_is_refused_with_the_right_order(inner):
    with raises_problem("conflict", "objective"):
        LIGS(inner(Standard(tiny())))


@pytest.mark.parametrize("outer", [APART, SAM, APARTSAM, AWP, LIGS])
@pytest.mark.parametrize("wrong", [tiny(), "hybrid", None, Standard], ids=["model", "name", "none", "class"])
def test_what_is_wrapped_must_be_an_objective(outer, wrong):
    with raises_problem("wrong_type", "objective"):
        outer(wrong)


@pytest.mark.parametrize(
    ("kind", "options", "fields"),
    [
        (APART, {"radius": -0.1, "samples": 0, "groups": 0, "group": 2}, {"radius", "samples", "groups", "group"}),
        (APART, {"radius": float("nan"), "samples": 1.5}, {"radius", "samples"}),
        (APART, {"radius": 1.0, "samples": True, "groups": True}, {"radius", "samples", "groups"}),
        (APART, {"samples": 10, "groups": 4, "radius": "0.1"}, {"groups", "radius"}),
        (SAM, {"rho": -1, "rhoo": 1}, {"rho", "rhoo"}),
        (APARTSAM, {"rho": None, "radius": -1, "samples": -3, "gropus": 2}, {"rho", "radius", "samples", "gropus"}),
        (AWP, {"gamma": "1", "norms": 1, "norm": True}, {"gamma", "norms", "norm"}),
    ],
)
def test_all_problems_of_options_come_in_one_error(kind, options, fields):
    with pytest.raises(ConfigError) as error:
        kind(Standard(tiny()), **options)
    assert {problem.field for problem in error.value.problems} == fields


@pytest.mark.parametrize("kind", [APART, APARTSAM])
@pytest.mark.parametrize("norm", ["gn", "dual_affine_ln", "none", "plain"])
def test_apart_needs_statistics_of_batches_to_attack_and_says_how_to_get_them(kind, norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    with pytest.raises(ConfigError, match=r"convert.*convert_norm") as told:
        kind(Standard(model))
    if norm == "plain":
        assert "'bn'" in str(told.value) or '"bn"' in str(told.value)
        advnorm.convert_norm(model, "bn")
        kind(Standard(model))(X, Y).loss.backward()


@pytest.mark.parametrize("norm", ["gn", "none", "dual_affine_in"])
@pytest.mark.parametrize("name", ["sam", "awp"])
def test_weights_can_be_attacked_whatever_the_norm(name, norm):
    model = tiny(norm)
    PASSES[name](Standard(model))(X, Y).loss.backward()
    assert model.conv1.weight.grad.abs().sum() > 0


@each_pass
def test_what_an_engine_sets_reaches_the_objective_inside(wrap):
    model = tiny("dual_bn")
    objective = wrap(LIGS(Hybrid(model, pgd())))
    inside = objective.objective.objective
    objective.attack, objective.statistics = pgd(steps=1), "running"
    assert inside.attack == pgd(steps=1) and inside.statistics == "running"
    assert objective.attack is inside.attack and objective.statistics == "running"
    assert objective.model is model and objective.needs_attack and objective.trained_domains() == ("clean", "adv")
    assert "Hybrid" in repr(objective) and "weight=1.0" in repr(objective)
    assert not wrap(Standard(model)).needs_attack and wrap(Standard(model)).trained_domains() == ("clean",)
    assert objective.innermost is inside
    through: list[int] = []
    execution = Execution(network=lambda x: (through.append(len(x)), model(x))[1])
    objective.attack, objective.statistics = Given(), "batch"
    objective(X, Y, execution=execution)
    assert len(through) == 2, "a compiled network takes the forwards of both passes"
    objective.seed, objective.label_smoothing = 5, 0.25
    assert inside.seed == objective.objective.seed == 5 and inside.label_smoothing == 0.25
    assert objective.domains == ("clean", "adv") and wrap(Standard(model)).domains == ("clean",)
    index = torch.arange(len(X))
    assert torch.equal(objective.craft(X, Y, index), inside.craft(X, Y, index))


@pytest.mark.parametrize("norm", ["bn", "dual_bn"])
def test_the_seed_decides_which_images_take_the_second_pass_and_the_noise_of_ligs(norm):
    index = torch.arange(M)
    apart, ligs = APART(Standard(tiny(norm)), samples=0.5), LIGS(Standard(tiny(norm)))

    def drawn(seed: int) -> tuple[list[int], float]:
        apart.seed = ligs.seed = seed
        subset = apart._subset(apart.craft_batch(X, Y, index))
        return subset.index.tolist(), ligs(X, Y, index=index).terms["ligs"].item()

    subsets, terms = zip(*map(drawn, (0, 1, 2, 0)))
    assert len(set(map(tuple, subsets))) == len(set(terms)) == 3
    assert subsets[0] == subsets[3] and terms[0] == terms[3]


def test_a_share_of_clean_images_that_makes_no_equal_groups_is_refused_before_anything_is_fed():
    model = tiny("dual_bn")
    objective = APART(Hybrid(model, pgd(), clean_share=0.5), groups=2)
    before = snapshot(model)
    with raises_problem("conflict", "groups"):
        objective(X[:6], Y[:6])
    assert not changed(model, before)
    assert objective(X, Y).loss.isfinite()


def test_a_gradient_in_half_precision_has_its_length_in_float32():
    """Squares of 1e-5 are none in float16: the step was a third of rho."""
    gradients = [torch.full((7,), 6e-6, dtype=torch.float16), torch.full((5,), -6e-6, dtype=torch.float16)]
    steps = SAM(Standard(tiny("bn")), rho=0.05).weight_perturbations(gradients, gradients)
    assert {step.dtype for step in steps} == {torch.float16}
    assert torch.cat(steps).double().norm().item() == pytest.approx(0.05, rel=1e-3)


# -- what it does to a network -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_the_attack_on_statistics_hurts_far_more_than_chance_and_more_in_groups(seed):
    """Paper B, fig. 1: one batch makes the perturbation, the training set judges."""
    model, everything = train(6, seed=seed), batches("train")

    def under(radius: float, kind: str = "gradient", groups: int = 1, draw: int = 0) -> float:
        attack = StatisticsPerturbation(radius=radius, kind=kind, groups=groups, seed=draw)
        return attack.accuracy(model, everything, attack.perturbation(model, *everything[0]))

    clean = under(0.0)
    lost = clean - under(0.5)
    by_chance = {
        kind: clean - sum(under(0.5, kind, draw=draw) for draw in range(3)) / 3 for kind in ("uniform", "binary")
    }
    in_groups = [under(0.5, groups=groups) for groups in (1, 4, 16)]
    assert clean > 0.98 and lost > 0.1
    assert lost > 5 * by_chance["uniform"] and lost > 1.4 * by_chance["binary"]
    assert in_groups[0] - 0.01 > in_groups[1] and in_groups[1] - 0.1 > in_groups[2]
    assert in_groups[2] < under(0.0, groups=16) - 0.2, "the groups alone do less"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_trained_with_apart_keeps_more_accuracy_under_perturbed_statistics(seed):
    """Paper B, fig. 2, at equal budgets: twice the epochs for the standard network."""
    standard = train(12, seed=seed)
    apart = train(6, seed=seed, wrap=lambda inner: APART(inner, radius=0.2, groups=4))
    x, y = digits("test")

    def under(model: nn.Module, which: Any, radius: float) -> float:
        attacks = [
            StatisticsPerturbation(
                radius=radius, kind="binary", which=which, scaling="std", statistics="running", seed=draw
            )
            for draw in range(5)
        ]
        return sum(attack.accuracy(model, [(x, y)], attack.perturbation(model)) for attack in attacks) / 5

    kept = {
        (which, radius): (under(standard, which, radius), under(apart, which, radius))
        for which, radius in (("mean", 0.0), ("mean", 0.6), ("mean", 0.8), ("std", 0.4), ("std", 0.6), ("std", 0.8))
    }
    clean = kept.pop(("mean", 0.0))
    assert min(clean) > 0.95
    assert all(robust > plain for plain, robust in kept.values())
    assert kept["mean", 0.8][1] > kept["mean", 0.8][0] + 0.05 and kept["std", 0.6][1] > kept["std", 0.6][0] + 0.05
