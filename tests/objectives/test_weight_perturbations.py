"""SAM and AWP."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import advnorm
from advnorm._core.errors import ConfigError
from advnorm.objectives import (
    APART,
    APARTSAM,
    AWP,
    LIGS,
    SAM,
    TRADES,
    CraftedBatch,
    Execution,
    Hybrid,
    ObjectiveOutput,
    Standard,
)
from support.norm_oracles import changed, snapshot
from support.objective_oracles import Given, Tiny, crafted, tiny
from support.problems import raises_problem
from support.second_pass_oracles import (
    EXACT,
    INDEX,
    PASSES,
    STANDARD,
    Expected,
    Gradients,
    Inner,
    M,
    X,
    Y,
    agree,
    algorithm_1,
    each_case,
    each_pass,
    equation_7,
    wu,
)


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


def test_awp_without_a_weight_to_move_is_rejected():
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


def test_the_description_of_an_objective_names_its_wrappers():
    objective = APARTSAM(LIGS(Standard(tiny()), weight=0.5), rho=0.1)
    for part in ("APARTSAM(", "rho=0.1", "LIGS(Standard(", "weight=0.5"):
        assert part in objective.describe()


def test_the_choices_of_an_objective_omit_defaults():
    attack = advnorm.attacks.PGD(threat=advnorm.ThreatModel(eps="8/255"), steps=3)
    objective = AWP(TRADES(tiny(), attack=attack, beta=2.0), gamma=0.01)
    words = "TRADES(attack=PGD(threat=Linf eps=8/255, steps=3, loss=kl), beta=2.0)"
    assert objective.describe_choices() == f"AWP({words}, gamma=0.01, norms=False)"


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
