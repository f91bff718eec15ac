"""Algorithm 1 of paper B line by line, and cases for tests of second passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from advnorm.objectives import (
    APART,
    APARTSAM,
    AWP,
    OBJECTIVES,
    SAM,
    CraftedBatch,
    Execution,
    Objective,
    ObjectiveOutput,
)
from support.norm_oracles import Oracle
from support.objective_oracles import Given, Network, Tiny, cross_entropy, forwards, images, kl, routed

M = 8


X, Y = images(M)


INDEX = torch.arange(M) + 1000


EXACT = {"rtol": 1e-9, "atol": 1e-11}


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


PASSES = {
    "apart": lambda inner: APART(inner, radius=0.2, samples=4, groups=2),
    "sam": lambda inner: SAM(inner, rho=0.3),
    "apart_sam": lambda inner: APARTSAM(inner, rho=0.3, radius=0.2, samples=4),
    "awp": lambda inner: AWP(inner, gamma=0.1),
}


each_pass = pytest.mark.parametrize("wrap", PASSES.values(), ids=PASSES)
