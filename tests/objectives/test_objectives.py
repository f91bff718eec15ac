"""Every objective against the papers' equations by hand: loss, terms, gradients and statistics, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from advnorm.objectives import OBJECTIVES, Objective, ObjectiveOutput, list_objectives
from support.norm_oracles import FORWARDED
from support.objective_oracles import (
    CONCATENATED,
    SEQUENTIAL,
    Given,
    Network,
    Tiny,
    crafted,
    cross_entropy,
    forwards,
    images,
    kl,
    mixed,
    pairing,
    pgd,
    tiny,
)

X, Y = images(5)
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@dataclass(frozen=True)
class Expected:
    """What the papers say: terms by name, the loss, and the logits by domain."""

    loss: Tensor
    terms: dict[str, Tensor]
    logits: dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """An objective with options, and its loss from the terms by hand."""

    name: str
    options: dict[str, Any]
    loss: Callable[[dict[str, Tensor]], Tensor]
    terms: tuple[str, ...]
    smoothing: float = 0.0
    domains: tuple[str, ...] = ("clean", "adv")
    only: tuple[str, ...] = field(default=tuple(CONCATENATED))

    def expected(self, network: Network, x: Tensor, y: Tensor, *, layout: str, mode: str = "batch") -> Expected:
        x_adv = crafted(x)
        if self.name == "cross":
            out = network.forward({"clean" + FORWARDED: x, "adv": x_adv}, mode=mode)
            logits = {"clean": out["clean" + FORWARDED], "adv": out["adv"]}
        elif len(self.domains) == 2:
            logits = forwards(network, x, x_adv, layout=layout, mode=mode)
        else:
            logits = network.forward({d: {"clean": x, "adv": x_adv}[d] for d in self.domains}, mode=mode)
        clean, adv = logits.get("clean"), logits.get("adv")
        by_name: dict[str, Callable[[], Tensor]] = {
            "clean_ce": lambda: cross_entropy(clean, y, self.smoothing),
            "adv_ce": lambda: cross_entropy(adv, y, self.smoothing),
            "kl": lambda: kl(clean, adv),
            "pairing": lambda: pairing(clean, adv),
            "likelihood": lambda: torch.stack(network.likelihoods).sum()[None],
        }
        terms = {name: by_name[name]().mean() for name in self.terms}
        return Expected(self.loss(terms), terms, logits)

    def objective(self, model: Tiny, **options: Any) -> Objective:
        attack = None if self.name == "standard" else Given()
        return OBJECTIVES.get(self.name)(model, attack, **self.options, **options)


BOTH = ("clean_ce", "adv_ce")
DUAL = {
    # A, eq. 2; C, eq. 1; E, eq. 1
    "hybrid": Case("hybrid", {"clean_weight": 0.3}, lambda t: 0.3 * t["clean_ce"] + 0.7 * t["adv_ce"], BOTH),
    "hybrid-default": Case("hybrid", {}, lambda t: 0.5 * t["clean_ce"] + 0.5 * t["adv_ce"], BOTH),
    "smoothed": Case(
        "hybrid", {"label_smoothing": 0.1}, lambda t: (t["clean_ce"] + t["adv_ce"]) / 2, BOTH, smoothing=0.1
    ),
    # C, eq. 3; A, table 8
    "kl": Case(
        "kl",
        {"clean_weight": 0.4, "kl_weight": 2.5},
        lambda t: 0.4 * t["clean_ce"] + 0.6 * t["adv_ce"] + 2.5 * t["kl"],
        (*BOTH, "kl"),
    ),
    # E, sec. 4.1
    "alp": Case(
        "alp",
        {"pairing_weight": 0.7},
        lambda t: 0.5 * t["clean_ce"] + 0.5 * t["adv_ce"] + 0.7 * t["pairing"],
        (*BOTH, "pairing"),
    ),
    "advprop": Case("advprop", {}, lambda t: 0.5 * t["clean_ce"] + 0.5 * t["adv_ce"], BOTH),
    # C, eq. 2
    "trades": Case("trades", {"beta": 6.0}, lambda t: t["clean_ce"] + 6 * t["kl"], ("clean_ce", "kl")),
    "trades-smoothed": Case(
        "trades",
        {"beta": 0.5, "label_smoothing": 0.2},
        lambda t: t["clean_ce"] + 0.5 * t["kl"],
        ("clean_ce", "kl"),
        smoothing=0.2,
    ),
    # C, eq. 3 and 21
    "likelihood": Case(
        "hybrid",
        {"clean_weight": 0.25, "likelihood_weight": 0.01},
        lambda t: 0.25 * t["clean_ce"] + 0.75 * t["adv_ce"] + 0.01 * t["likelihood"],
        (*BOTH, "likelihood"),
        only=("gmm_bn",),
    ),
    "everything": Case(
        "hybrid",
        {"kl_weight": 0.4, "pairing_weight": 0.1, "likelihood_weight": 0.02, "label_smoothing": 0.1},
        lambda t: (t["clean_ce"] + t["adv_ce"]) / 2 + 0.4 * t["kl"] + 0.1 * t["pairing"] + 0.02 * t["likelihood"],
        (*BOTH, "kl", "pairing", "likelihood"),
        smoothing=0.1,
        only=("gmm_bn",),
    ),
    "trades-likelihood": Case(
        "trades",
        {"likelihood_weight": 0.02},
        lambda t: t["clean_ce"] + 6 * t["kl"] + 0.02 * t["likelihood"],
        ("clean_ce", "kl", "likelihood"),
        only=("gmm_bn",),
    ),
}
#: A, eq. 1 and Cross-AT; the objectives of one domain have one forward, whatever the layout.
CLASSICAL = Case("classical", {}, lambda t: t["adv_ce"], ("adv_ce",), domains=("adv",))
STANDARD = Case("standard", {}, lambda t: t["clean_ce"], ("clean_ce",), domains=("clean",))
CROSS = Case("cross", {}, lambda t: t["adv_ce"], ("adv_ce",))


def agree(objective: Objective, step: ObjectiveOutput, network: Network, expected: Expected) -> None:
    """Loss, terms, logits, the gradient of every parameter and every statistic, after one backward of both."""
    torch.testing.assert_close(step.loss, expected.loss, **EXACT)
    assert list(step.logits) == list(expected.logits)
    for domain, logits in expected.logits.items():
        torch.testing.assert_close(step.logits[domain], logits, **EXACT)
    assert set(step.terms) == set(expected.terms)
    for name, term in expected.terms.items():
        torch.testing.assert_close(step.terms[name], term.detach(), **EXACT, msg=lambda m, name=name: f"{name}: {m}")
        assert not step.terms[name].requires_grad and step.terms[name].dim() == 0
    step.loss.backward()
    expected.loss.backward()
    parameters = dict(objective.model.named_parameters())
    assert set(parameters) == set(network.gradients)
    for name, gradient in network.gradients.items():
        own = parameters[name].grad
        own = torch.zeros_like(gradient) if own is None else own
        torch.testing.assert_close(own, gradient, **EXACT, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for name, buffer in objective.model.named_buffers():
        torch.testing.assert_close(
            buffer.double(), network.buffers[name].double(), **EXACT, msg=lambda m, name=name: f"{name}: {m}"
        )


def layouts(norm: str) -> list[str]:
    return ["concatenated", "sequential"] if norm in SEQUENTIAL else ["concatenated"]


@pytest.mark.parametrize(
    ("case", "norm", "layout"),
    [
        pytest.param(case, norm, layout, id=f"{key}-{norm}-{layout}")
        for key, case in DUAL.items()
        for norm in case.only
        for layout in layouts(norm)
    ],
)
def test_a_dual_domain_objective_is_the_papers_equation(case, norm, layout):
    model = tiny(norm)
    network = Network(model)
    expected = case.expected(network, X, Y, layout=layout)
    objective = case.objective(model, layout=layout)
    agree(objective, objective(X, Y), network, expected)


@pytest.mark.parametrize("case", [DUAL["hybrid"], DUAL["trades"]], ids=lambda case: case.name)
@pytest.mark.parametrize(("norm", "layout"), [("bn", "concatenated"), ("bn", "sequential"), ("gmm_bn", "concatenated")])
def test_a_linear_layer_per_domain_learns_from_its_domain_alone(case, norm, layout):
    """Paper A, table 7: Dual Linear."""
    model = tiny(norm, dual_head=True)
    network = Network(model)
    expected = case.expected(network, X, Y, layout=layout)
    objective = case.objective(model, layout=layout)
    agree(objective, objective(X, Y), network, expected)


@pytest.mark.parametrize("norm", [*SEQUENTIAL, "plain"])
@pytest.mark.parametrize("case", [STANDARD, CLASSICAL], ids=lambda case: case.name)
def test_an_objective_of_one_domain_sees_the_other_neither_in_the_loss_nor_in_the_statistics(case, norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    network = Network(model)
    expected = case.expected(network, X, Y, layout="sequential")
    objective = case.objective(model)
    agree(objective, objective(X, Y), network, expected)
    other = {"clean": "_adv", "adv": "_clean"}[case.domains[0]]
    for name, parameter in model.named_parameters():
        assert not (name.endswith(other) and parameter.grad is not None and parameter.grad.any()), name


@pytest.mark.parametrize("layout", ["concatenated", "sequential"])
@pytest.mark.parametrize("key", ["hybrid", "kl", "alp", "trades"])
def test_a_network_of_built_in_norms_needs_no_routes(key, layout):
    model = tiny(plain=True)
    network = Network(model)
    expected = DUAL[key].expected(network, X, Y, layout=layout)
    objective = DUAL[key].objective(model, layout=layout)
    agree(objective, objective(X, Y), network, expected)


def test_the_layouts_are_different_methods_for_one_bank_and_the_same_for_two():
    """Paper C, sec. 3.1: the only difference lies in the batch norm."""
    losses = {
        (norm, layout): DUAL["hybrid"].objective(tiny(norm), layout=layout)(X, Y).loss.item()
        for norm in SEQUENTIAL
        for layout in ("concatenated", "sequential")
    }
    for norm in SEQUENTIAL:
        together, apart = losses[norm, "concatenated"], losses[norm, "sequential"]
        if norm in ("bn", "dual_affine_bn"):
            assert abs(together - apart) > 1e-3
        else:
            assert together == pytest.approx(apart, rel=1e-12)


def test_a_sequential_step_updates_one_bank_twice_and_a_concatenated_one_once():
    for layout, batches in (("sequential", 2), ("concatenated", 1)):
        model = tiny("bn")
        before = int(model.norm1.num_batches_tracked)
        DUAL["hybrid"].objective(model, layout=layout)(X, Y)
        assert int(model.norm1.num_batches_tracked) - before == batches


@pytest.mark.parametrize(("mode", "clean", "adv"), [("running", 0, 0), ("batch_frozen", 0, 0), ("batch", 1, 5)])
def test_an_attack_updates_only_the_banks_that_its_statistics_option_allows(mode, clean, adv):
    """Beside the training pass: TRADES computes the clean output once, then maximizes the loss (trap 1)."""
    model = tiny("dual_bn")
    before = [int(model.norm1.statistics_bank(domain)[2]) for domain in ("clean", "adv")]
    OBJECTIVES.get("trades")(model, pgd(steps=5, statistics=mode))(X, Y)
    after = [int(model.norm1.statistics_bank(domain)[2]) for domain in ("clean", "adv")]
    assert [b - a for a, b in zip(before, after)] == [1 + clean, 1 + adv]


# -- the clean images' share (paper E, sec. 4.1) -----------------------------------------------------------------------


def spread(kept: int, count: int) -> list[int]:
    """Positions of ``kept`` of ``count`` images, spread evenly, so that every rank keeps its share of them."""
    return [position * count // kept for position in range(kept)]


@pytest.mark.parametrize("layout", ["concatenated", "sequential"])
@pytest.mark.parametrize("norm", ["bn", "dual_bn", "plain"])
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 1.0])
def test_a_share_of_the_clean_images_enters_as_a_weighted_mean_over_the_images(share, norm, layout):
    x, y = images(10)
    kept, weight = spread(round(10 * share), 10), 0.3
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    network = Network(model)
    if kept:
        logits = forwards(network, x[kept], crafted(x), layout=layout)
        clean = cross_entropy(logits["clean"], y[kept])
    else:
        logits, clean = network.forward({"adv": crafted(x)}), torch.zeros(0, dtype=torch.float64)
    adv = cross_entropy(logits["adv"], y)
    terms = {"adv_ce": adv.mean()} | ({"clean_ce": clean.mean()} if kept else {})
    objective = OBJECTIVES.get("hybrid")(model, Given(), clean_weight=weight, clean_share=share, layout=layout)
    agree(objective, objective(x, y), network, Expected(mixed(clean, adv, weight), terms, logits))


def test_without_clean_images_hybrid_training_is_classical_training():
    hybrid, classical = (tiny("dual_bn") for _ in range(2))
    OBJECTIVES.get("hybrid")(hybrid, Given(), clean_share=0.0)(X, Y).loss.backward()
    OBJECTIVES.get("classical")(classical, Given())(X, Y).loss.backward()
    for (name, a), b in zip(hybrid.named_parameters(), classical.parameters()):
        if a.grad is None or b.grad is None:
            assert a.grad is None and b.grad is None, name
        else:
            torch.testing.assert_close(a.grad, b.grad, **EXACT)
    for a, b in zip(hybrid.buffers(), classical.buffers()):
        assert torch.equal(a, b)


@pytest.mark.parametrize("key", ["kl", "alp"])
def test_with_a_share_of_the_clean_images_pairs_are_those_images_and_their_own_counterparts(key):
    x, y = images(10)
    kept = spread(4, 10)
    case = DUAL[key]
    model = tiny("dual_bn")
    network = Network(model)
    logits = forwards(network, x[kept], crafted(x))
    clean, adv = cross_entropy(logits["clean"], y[kept]), cross_entropy(logits["adv"], y)
    pairs = logits["clean"], logits["adv"][kept]
    terms = {"clean_ce": clean.mean(), "adv_ce": adv.mean(), "kl": kl(*pairs).mean(), "pairing": pairing(*pairs).mean()}
    loss = {"kl": mixed(clean, adv, 0.4) + 2.5 * terms["kl"], "alp": mixed(clean, adv, 0.5) + 0.7 * terms["pairing"]}[
        key
    ]
    objective = case.objective(model, clean_share=0.4)
    expected = Expected(loss, {name: terms[name] for name in case.terms}, logits)
    agree(objective, objective(x, y), network, expected)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    count=st.integers(2, 9),
    share=st.floats(0.3, 1.0),
    weight=st.floats(0.0, 1.0),
    smoothing=st.floats(0.0, 0.9),
    norm=st.sampled_from([*CONCATENATED]),
    sequential=st.booleans(),
)
def test_hybrid_holds_for_any_batch_size_share_and_weight(count, share, weight, smoothing, norm, sequential):
    x, y = images(count, seed=count)
    layout = "sequential" if sequential and norm in SEQUENTIAL else "concatenated"
    model = tiny(norm)
    network = Network(model)
    objective = OBJECTIVES.get("hybrid")(
        model, Given(), clean_weight=weight, clean_share=share, label_smoothing=smoothing, layout=layout
    )
    step = objective(x, y)
    kept = spread(len(step.logits["clean"]), count)
    assert abs(len(kept) - share * count) <= 0.5
    logits = forwards(network, x[kept], crafted(x), layout=layout)
    clean, adv = cross_entropy(logits["clean"], y[kept], smoothing), cross_entropy(logits["adv"], y, smoothing)
    expected = Expected(mixed(clean, adv, weight), {"clean_ce": clean.mean(), "adv_ce": adv.mean()}, logits)
    agree(objective, step, network, expected)


# -- Cross-AT (paper A, sec. 3) ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("other_gradient", [False, True])
def test_cross_at_is_the_adversarial_loss_under_the_clean_images_statistics(other_gradient, mode):
    model = tiny("cross_bn", other_gradient=other_gradient)
    network = Network(model, other_gradient=other_gradient)
    expected = CROSS.expected(network, X, Y, layout="concatenated", mode=mode)
    objective = CROSS.objective(model, statistics=mode)
    agree(objective, objective(X, Y), network, expected)


@pytest.mark.parametrize("other_gradient", [False, True])
def test_cross_at_learns_from_the_clean_images_at_most_through_their_statistics(other_gradient):
    model = tiny("cross_bn", other_gradient=other_gradient)
    x = X.clone().requires_grad_()
    CROSS.objective(model)(x, Y).loss.backward()
    assert (x.grad is not None and bool(x.grad.any())) is other_gradient
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None and bool(parameter.grad.any())) is not name.endswith("_clean"), name


def test_cross_hybrid_at_learns_from_both_with_and_without_gradients_through_the_other_statistics():
    """Table 2: Cross-Hybrid-AT is hybrid training on cross_bn."""
    losses = []
    for other_gradient in (False, True):
        model = tiny("cross_bn", other_gradient=other_gradient)
        network = Network(model, other_gradient=other_gradient)
        expected = DUAL["hybrid"].expected(network, X, Y, layout="concatenated")
        objective = DUAL["hybrid"].objective(model)
        agree(objective, objective(X, Y), network, expected)
        losses.append(model.conv1.weight.grad)
    assert not torch.allclose(*losses)


# -- statistics of the training pass (paper E, sec. 4.3) ---------------------------------------------------------------


@pytest.mark.parametrize("norm", [*CONCATENATED, "plain"])
@pytest.mark.parametrize("key", ["hybrid", "kl", "trades"])
def test_a_training_pass_on_running_statistics_leaves_them_untouched(key, norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    model.norm1.eval()  # frozen by its owner (trap 3)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    network = Network(model)
    expected = DUAL[key].expected(network, X, Y, layout="concatenated", mode="running")
    objective = DUAL[key].objective(model, statistics="running")
    agree(objective, objective(X, Y), network, expected)
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert [module for module in model.modules() if not module.training] == [model.norm1]


@pytest.mark.parametrize("norm", ["dual_bn", "plain"])
def test_training_can_turn_to_running_statistics_and_back(norm):
    model = tiny(plain=True) if norm == "plain" else tiny(norm)
    objective = DUAL["hybrid"].objective(model)
    batch = objective(X, Y).loss.item()
    objective.statistics = "running"
    running = objective(X, Y).loss.item()
    assert running != pytest.approx(batch, rel=1e-6)
    assert objective(X, Y).loss.item() == running
    objective.statistics = "batch"
    assert objective(X, Y).loss.item() == pytest.approx(batch, rel=1e-12)


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e4, 1e6])
@pytest.mark.parametrize("key", ["kl", "trades"])
def test_the_divergence_of_probabilities_that_underflow_has_finite_gradients(key, scale):
    model = tiny("dual_bn")
    with torch.no_grad():
        model.fc.weight *= scale
    network = Network(model)
    expected = DUAL[key].expected(network, X, Y, layout="concatenated")
    expected.loss.backward()
    model.float()
    step = DUAL[key].objective(model)(X, Y)
    step.loss.backward()
    assert (step.logits["clean"].softmax(1) == 0).any()
    torch.testing.assert_close(step.loss.double(), expected.loss, rtol=1e-3, atol=0.0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    torch.testing.assert_close(model.fc.bias.grad.double(), network.gradients["fc.bias"], rtol=1e-3, atol=1e-5)


def built(name: str, model: Tiny, **options: Any) -> Objective:
    return OBJECTIVES.get(name)(model, None if name == "standard" else Given(), **options)


@pytest.mark.parametrize("name", list_objectives())
def test_half_precision_gives_the_finite_loss_of_full_precision(name):
    norm = "cross_bn" if name == "cross" else "dual_bn"
    exact = built(name, tiny(norm))(X, Y).loss
    model = tiny(norm).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        step = built(name, model)(X, Y)
    step.loss.backward()
    assert step.loss.dtype == torch.float32
    assert all(logits.dtype == torch.float32 for logits in step.logits.values())
    assert step.loss.item() == pytest.approx(exact.item(), rel=0.05)
    for parameter in model.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", list_objectives())
def test_every_registered_objective_lowers_its_loss_by_gradient_descent(name):
    model = tiny("cross_bn" if name == "cross" else "dual_bn")
    objective = built(name, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        step = objective(X, Y)
        step.loss.backward()
        optimizer.step()
        losses.append(step.loss.item())
    assert losses[-1] < 0.95 * losses[0]


def test_the_names_of_the_objectives():
    assert set(list_objectives()) >= {"standard", "classical", "hybrid", "cross", "trades", "alp", "kl"}
    assert all(OBJECTIVES.get(name).summary and OBJECTIVES.get(name).paper for name in list_objectives())


@pytest.mark.parametrize(
    ("share", "clean", "trained"),
    [(1.0, 8, ("clean", "adv")), (0.25, 2, ("clean", "adv")), (0.01, 1, ("clean", "adv")), (0.0, 0, ("adv",))],
)
def test_the_share_of_clean_images_says_what_a_step_trains(share, clean, trained):
    objective = OBJECTIVES.get("hybrid")(tiny("dual_bn"), Given(), clean_share=share)
    assert objective.images_per_domain(8) == {"clean": clean, "adv": 8}
    assert objective.trained_domains() == trained
