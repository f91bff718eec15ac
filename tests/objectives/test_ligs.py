"""LIGS as a regularizer (paper D, eq. 1, fig. 5, app. B.4) against gradients by hand, and what it does to a network."""

from __future__ import annotations

import copy
from typing import Any, get_args

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import advnorm
from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD
from advnorm.data.digits import digits
from advnorm.norms import list_norms
from advnorm.norms.routed_module import routed_modules
from advnorm.norms.state import UNSCOPED
from advnorm.objectives import LIGS, TRADES, Classical, Cross, Execution, Hybrid, Objective, Standard
from advnorm.objectives.ligs import Shift, loss_direction, shift_images
from support.digits_training import accuracy, train
from support.norm_oracles import changed, needed, snapshot
from support.objective_oracles import Given, Network, Tiny, cross_entropy, images, pgd, tiny
from support.problems import raises_problem

M = 6
X32, Y = images(M)
X = X32.double()
INDEX = torch.arange(M) + 70
EXACT = {"rtol": 1e-9, "atol": 1e-11}
SHIFTS = get_args(Shift)
BOTH = ("cross_bn", "gmm_bn")  # a batch of one domain cannot be normalized by its own statistics


def noise() -> ImageNoise:
    return ImageNoise(0, INDEX).fold("ligs")


def near(model: nn.Module, shift: Shift, size: float = 0.01, route: str = "clean") -> Tensor:
    """``x + ν`` as the regularizer draws it."""

    def predict(x: Tensor) -> Tensor:
        with advnorm.statistics(model, mode="batch_frozen"), advnorm.route(model, route):
            return model(x)

    return shift_images(shift, X, Y, noise(), size, predict).detach()


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Eq. 1: one value per image."""
    a, b = a.reshape(len(a), -1), b.reshape(len(b), -1)
    return (a * b).sum(1) / ((a * a).sum(1) ** 0.5 * (b * b).sum(1) ** 0.5)


def input_gradients(network: Network, x: Tensor, *, domain: str, mode: str) -> Tensor:
    """``∇_x l(x_i, y_i)``, with the graph: of all images at once, which with batch statistics hang together."""
    x = x.clone().requires_grad_()
    loss = cross_entropy(network.forward({domain: x}, mode=mode)[domain], Y).sum()
    return torch.autograd.grad(loss, x, create_graph=True)[0]


def by_hand(model: Tiny, at: Tensor, *, domain: str = "clean", mode: str = "batch_frozen") -> tuple[Network, Tensor]:
    network = Network(model)
    first, second = (input_gradients(network, x, domain=domain, mode=mode) for x in (X, at))
    return network, cosine(first, second).mean()


def one_by_one(model: nn.Module, at: Tensor, *, route: str = "clean", mode: str = "running") -> Tensor:
    """Eq. 1 with a forward and a backward for each image alone."""
    values = []
    with advnorm.route(model, route), advnorm.statistics(model, mode=mode):
        for i in range(M):
            pair = []
            for x in (X, at):
                leaf = x[i : i + 1].clone().requires_grad_()
                F.nll_loss(F.log_softmax(model(leaf), 1), Y[i : i + 1]).backward()
                pair.append(leaf.grad)
            values.append(cosine(*pair))
    model.zero_grad()
    return torch.cat(values).mean()


# -- the value ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("norm", ["gn", "ln", "in", "none", "dual_affine_gn"])
def test_with_norms_of_single_samples_ligs_is_a_mean_over_gradients_of_single_images(norm, shift):
    model = tiny(norm)
    expected = one_by_one(model, near(model, shift))
    found = LIGS(Standard(model), shift=shift).similarity(X, Y, noise())
    torch.testing.assert_close(found.detach(), expected, **EXACT)
    assert 0 < float(found) < 1 - 1e-7


@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn"])
def test_with_norms_in_eval_mode_the_stored_statistics_count(norm):
    model = tiny(norm)
    model.norm1.eval(), model.norm2.eval()
    expected = one_by_one(model, near(model, "gaussian"))
    found = LIGS(Standard(model)).similarity(X, Y, noise())
    torch.testing.assert_close(found.detach(), expected, **EXACT)


@pytest.mark.parametrize("norm", BOTH)
def test_where_a_norm_needs_both_domains_the_stored_statistics_count(norm):
    model = tiny(norm)
    expected = one_by_one(model, near_stored(model))
    found = LIGS(Hybrid(model, Given())).similarity(X, Y, noise())
    torch.testing.assert_close(found.detach(), expected, **EXACT)


def near_stored(model: nn.Module) -> Tensor:
    return shift_images("gaussian", X, Y, noise(), 0.01, model).detach()


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("norm", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn"])
def test_with_statistics_of_the_batch_value_and_gradient_are_those_of_the_network_by_hand(norm, shift):
    model = tiny(norm)
    network, expected = by_hand(model, near(model, shift))
    found = LIGS(Standard(model), shift=shift).similarity(X, Y, noise())
    torch.testing.assert_close(found, expected, **EXACT)
    found.backward()
    expected.backward()
    for name, wanted in network.gradients.items():
        own = dict(model.named_parameters())[name].grad
        own = torch.zeros_like(wanted) if own is None else own
        torch.testing.assert_close(own, wanted, **EXACT, msg=lambda m, name=name: f"gradient of {name}: {m}")


@pytest.mark.parametrize(("objective", "domain"), [(Standard, "clean"), (Classical, "adv"), (Hybrid, "clean")])
def test_it_goes_through_the_first_branch_that_is_trained(objective, domain):
    model = tiny("dual_bn")
    _, expected = by_hand(model, near(model, "gaussian"), domain=domain)
    _, other = by_hand(model, near(model, "gaussian"), domain="adv" if domain == "clean" else "clean")
    found = LIGS(objective(model, Given())).similarity(X, Y, noise())
    torch.testing.assert_close(found, expected, **EXACT)
    assert abs(float(expected - other)) > 1e-4


@pytest.mark.parametrize("shift", SHIFTS)
def test_the_gradient_of_the_regularizer_is_its_finite_difference(shift):
    """On smooth activations, whose gradients have gradients."""

    class Smooth(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            x = F.silu(self.norm1(self.conv1(x.to(self.conv1.weight.dtype))))
            return self.fc(F.silu(self.norm2(self.conv2(x))).mean((2, 3)))

    model = tiny("bn")
    model.__class__ = Smooth
    at = near(model, shift, 0.3)  # ν is a constant, also where it is an attack; large, so that there is a slope
    objective = LIGS(Standard(model), shift=shift, size=0.3)

    def value() -> Tensor:
        return objective.similarity(X, Y, noise())

    value().backward()
    if shift in ("fgsm", "pgd"):  # the attack must not follow the moved weights
        objective.shift = "gaussian"
        fixed = at - X

        class Fixed(ImageNoise):
            def normal(self, *_: Any) -> Tensor:
                return fixed / 0.3

        def value() -> Tensor:
            return objective.similarity(X, Y, Fixed(0, INDEX))

    checked = 0
    for name, parameter in model.named_parameters():
        flat = parameter.detach().view(-1)
        for i in {0, len(flat) // 2}:
            original, ends = flat[i].item(), []
            for sign in (1, -1):
                flat[i] = original + sign * 1e-5
                ends.append(value().item())
            flat[i] = original
            slope = (ends[0] - ends[1]) / 2e-5
            grad = 0.0 if parameter.grad is None else parameter.grad.view(-1)[i].item()
            assert slope == pytest.approx(grad, rel=1e-4, abs=1e-7), name
            checked += abs(grad) > 1e-4
    assert checked >= 8


@pytest.mark.parametrize("scale", [1e-3, 1e-9])
def test_ligs_is_a_cosine_whatever_the_length_of_the_gradients(scale):
    """Eq. 1 divides by the lengths: a network that is sure of itself has short gradients and a LIGS all the same."""
    model = tiny("gn")
    with torch.no_grad():
        model.fc.weight *= scale
    expected = one_by_one(model, near(model, "gaussian"))
    found = LIGS(Standard(model)).similarity(X, Y, noise())
    torch.testing.assert_close(found.detach(), expected, rtol=1e-6, atol=1e-6)
    assert float(expected) > 0.5


def test_an_image_without_a_gradient_makes_nothing_nan():
    model = tiny("none")
    with torch.no_grad():
        model.conv1.bias.fill_(-100)  # no unit is alive
    step = LIGS(Standard(model))(X32, Y)
    step.loss.backward()
    assert step.loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_an_image_with_a_gradient_at_one_of_the_points_alone_makes_nothing_nan():
    """Its cosine is 0/0: it counts as 0, and no parameter learns from it."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(X32[0].numel(), 4), nn.ReLU(), nn.Linear(4, 4))
    for bias in torch.linspace(-1, 1, 41).tolist():  # some image's units die between its two points
        with torch.no_grad():
            model[1].bias.fill_(bias)
        objective = LIGS(Standard(model), size=0.3)
        model.zero_grad()
        step = objective(X32, Y, index=INDEX)
        step.loss.backward()
        assert step.loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters()), bias


def test_what_a_network_draws_is_the_same_at_both_points():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(X32[0].numel(), 64), nn.Tanh(), nn.Dropout(0.5), nn.Linear(64, 4))
    objective = LIGS(Standard(model), size=0.0)
    values = [float(objective(X32, Y, index=INDEX).terms["ligs"]) for _ in range(2)]
    assert values == pytest.approx([1, 1], abs=1e-6)
    masks = [objective(X32, Y, index=INDEX).logits["clean"].detach() for _ in range(2)]
    assert not torch.equal(*masks)  # from step to step they are others


def test_a_compiled_model_is_regularized_by_the_model_inside():
    model = tiny("bn")
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager")
    found, expected = (LIGS(Standard(m))(X32, Y, index=INDEX) for m in (compiled, model))
    torch.testing.assert_close(found.loss, expected.loss, **EXACT)
    found.loss.backward()


def test_a_size_is_a_length_in_pixel_scale_for_every_shift():
    one, other = (LIGS(Standard(tiny("bn")), size=size)(X, Y, index=INDEX) for size in ("8/255", 8 / 255))
    assert torch.equal(one.terms["ligs"], other.terms["ligs"])
    for shift in SHIFTS:
        with raises_problem("out_of_range", "size"):
            LIGS(Standard(tiny("bn")), shift=shift, size=8)


def test_one_regularizer_is_enough():
    with raises_problem("conflict", "objective"):
        LIGS(LIGS(Standard(tiny("bn"))))


@pytest.mark.parametrize("margin", [0.0, 5.0, 17.0, 34.0, 85.0])
@pytest.mark.parametrize("share", [1.0, 1 - 2**-20, 0.9, 0.5])
def test_the_direction_with_soft_labels_is_exact_for_confident_images(share, margin):
    """``p - y`` rounds away in float32. Float64 has the class's part of it without cancellation: ``1 - p`` is a sum."""
    torch.manual_seed(0)
    logits = torch.randn(20, 10)
    logits[:, 3] = logits.scatter(1, torch.full((20, 1), 3), -torch.inf).logsumexp(1) + margin
    y = (1 - share) * torch.rand(20, 10).scatter(1, torch.full((20, 1), 3), 0).softmax(1)
    y[:, 3] = share
    x = logits.requires_grad_()
    found = loss_direction(x, y, x).double()
    p, wide = x.detach().double().softmax(1), y.double()
    beside = 1 - torch.eye(10, dtype=torch.float64)
    exact = (wide @ beside) * p - wide * (p @ beside)
    expected = exact / exact.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found / found.abs().amax(1, keepdim=True), expected, rtol=1e-5, atol=1e-5)


# -- the shifts of app. B.4 --------------------------------------------------------------------------------------------


def test_gaussian_and_uniform_shifts_have_the_papers_size():
    x, y = torch.full((64, 2, 20, 20), 0.5, dtype=torch.float64), torch.zeros(64, dtype=torch.long)
    own = ImageNoise(3, torch.arange(64))
    gauss = shift_images("gaussian", x, y, own, 0.01, None) - x
    assert float(gauss.std()) == pytest.approx(0.01, rel=0.02) and abs(float(gauss.mean())) < 2e-4
    assert float((gauss**4).mean() / (gauss**2).mean() ** 2) == pytest.approx(3, abs=0.1)
    flat = shift_images("uniform", x, y, own, 0.01, None) - x
    assert float(flat.abs().max()) <= 0.01 and float(flat.std()) == pytest.approx(0.01 / 3**0.5, rel=0.02)


@pytest.mark.parametrize("shift", ["fgsm", "pgd"])
def test_a_shift_by_an_attack_rejects_soft_labels(shift):
    with raises_problem("wrong_dtype", "labels"):
        LIGS(Standard(tiny()), shift=shift)(X32, F.one_hot(Y, 4).float())


@pytest.mark.parametrize("shift", ["fgsm", "pgd"])
def test_fgsm_and_pgd_shifts_ascend_the_loss_inside_the_papers_ball(shift):
    model = tiny("gn")
    at = near(model, shift)
    assert float((at - X).abs().max()) <= 0.01 + 1e-6 and at.min() >= 0 and at.max() <= 1
    with torch.no_grad(), advnorm.route(model, "clean"):
        before, after, random = (F.cross_entropy(model(x), Y) for x in (X, at, near(model, "uniform")))
    assert float(after - before) > 5 * abs(float(random - before))
    leaf = X.clone().requires_grad_()
    with advnorm.route(model, "clean"):
        F.cross_entropy(model(leaf), Y).backward()
    if shift == "fgsm":
        wanted = (X + 0.01 * leaf.grad.sign()).clamp(0, 1)
        assert float(((at - wanted).abs() < 1e-6).double().mean()) > 0.999


def test_a_pgd_shift_takes_seven_steps_of_the_papers_length():
    model, forwards = tiny("gn"), []
    model.register_forward_hook(lambda *_: forwards.append(1))
    near(model, "pgd")
    attack = PGD(threat=advnorm.ThreatModel(eps=0.01), steps=7)
    assert len(forwards) == 7 and attack.step == pytest.approx(2.5 * 0.01 / 7)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(order=st.permutations(range(M)), shift=st.sampled_from(["gaussian", "uniform"]))
def test_an_image_keeps_its_noise_wherever_it_stands_in_the_batch(order, shift):
    rows = torch.tensor(order)
    one = shift_images(shift, X, Y, ImageNoise(0, INDEX), 0.01, None)[rows]
    other = shift_images(shift, X[rows], Y[rows], ImageNoise(0, INDEX[rows]), 0.01, None)
    assert torch.equal(one, other)


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.0, 0.5, 4.0])
def test_the_loss_is_that_of_the_objective_and_the_weighted_lack_of_similarity(weight):
    model, alone = tiny("dual_bn"), tiny("dual_bn")
    step = LIGS(Hybrid(model, Given()), weight=weight)(X32, Y, index=INDEX)
    plain = Hybrid(alone, Given())(X32, Y, index=INDEX)
    similarity = LIGS(Hybrid(alone, Given())).similarity(X32, Y, noise())
    torch.testing.assert_close(step.loss, plain.loss + weight * (1 - similarity), **EXACT)
    torch.testing.assert_close(step.terms, {**plain.terms, "ligs": similarity.detach()}, **EXACT)
    assert not step.terms["ligs"].requires_grad and torch.equal(step.labels["adv"], plain.labels["adv"])
    step.loss.backward()
    (plain.loss + weight * (1 - similarity)).backward()
    for a, b in zip(model.parameters(), alone.parameters()):
        torch.testing.assert_close(a.grad, b.grad, **EXACT)
    assert changed(model, snapshot(alone)) == set()


def objective_for(norm: str, model: nn.Module) -> Objective:
    return Hybrid(model, Given()) if norm in BOTH else Standard(model)


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("norm", list_norms())
def test_every_registered_norm_can_be_regularized_and_is_not_updated_by_it(norm, shift):
    model = tiny(norm, **needed(norm))
    alone = copy.deepcopy(model)
    step = LIGS(objective_for(norm, model), shift=shift)(X32, Y)
    objective_for(norm, alone)(X32, Y)
    assert changed(model, snapshot(alone)) == set()
    flags = [module.training for module in model.modules()]
    step.loss.backward()
    assert model.conv1.weight.grad.isfinite().all() and 0 < float(step.terms["ligs"]) < 1
    assert all(flags) and all(module.state is UNSCOPED for module in routed_modules(model).values())


@pytest.mark.parametrize("wrap", [TRADES, Classical, Hybrid])
def test_any_objective_can_be_regularized(wrap):
    model = tiny("dual_bn")
    step = LIGS(wrap(model, pgd()))(X32, Y)
    step.loss.backward()
    assert "ligs" in step.terms and step.loss.isfinite()


def test_cross_at_can_be_regularized():
    model = tiny("cross_bn")
    LIGS(Cross(model, Given()))(X32, Y).loss.backward()
    assert model.conv1.weight.grad.isfinite().all()


@pytest.mark.parametrize("mode", ["batch", "running"])
def test_ligs_uses_the_statistics_that_the_objective_trains_with(mode):
    """Paper E's last epochs train on stored statistics; a regularizer with others would train another function."""
    model = tiny("bn")
    objective = LIGS(Standard(model))
    objective.statistics = mode
    _, expected = by_hand(model, near_stored(model), mode={"batch": "batch_frozen", "running": "running"}[mode])
    found = objective(X, Y, index=INDEX).terms["ligs"]
    torch.testing.assert_close(found, expected.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("layer", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_built_in_norms_are_not_updated(layer):
    model = tiny(plain=True)
    model.norm1 = layer(4, affine=True, track_running_stats=True).double()
    alone = copy.deepcopy(model)
    LIGS(Standard(model))(X32, Y).loss.backward()
    Standard(alone)(X32, Y)
    assert changed(model, snapshot(alone)) == set() and model.norm1.track_running_stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_network_takes_the_images_in_its_own_precision(dtype):
    """As every objective offers: float32 images, whatever the network's precision."""
    model = advnorm.create_model("small_cnn", num_classes=4, norm="bn", in_channels=2, normalize=False).to(dtype)
    Standard(model)(X32, Y).loss.backward()
    LIGS(Standard(model))(X32, Y).loss.backward()


def test_under_autocast_the_value_is_near_that_of_float32():
    model = tiny("bn").float()
    exact = LIGS(Standard(copy.deepcopy(model)))(X32, Y, index=INDEX).terms["ligs"]
    with torch.autocast("cpu", torch.bfloat16):
        step = LIGS(Standard(model))(X32, Y, index=INDEX)
    step.loss.backward()
    assert step.terms["ligs"].dtype == torch.float32 and abs(float(step.terms["ligs"] - exact)) < 0.05
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_a_compiled_network_is_left_aside_for_the_second_derivative():
    model, through = tiny("bn"), []
    objective = LIGS(Standard(model))
    execution = Execution(network=lambda x: (through.append(1), model(x).detach().requires_grad_())[1])
    objective(X32, Y, execution=execution).loss.backward()
    assert through == [1] and model.conv1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"weight": -1, "size": "small", "shift": "gausian", "wieght": 1}, {"weight", "size", "shift", "wieght"}),
        ({"size": float("inf"), "shift": None}, {"size", "shift"}),
    ],
)
def test_all_problems_of_options_come_in_one_error(options, fields):
    with pytest.raises(ConfigError) as error:
        LIGS(Standard(tiny()), **options)
    assert {problem.field for problem in error.value.problems} == fields


@pytest.mark.parametrize("shift", SHIFTS)
def test_a_shift_of_size_0_gives_a_similarity_of_1(shift):
    objective = LIGS(Standard(tiny("gn")), shift=shift, size=0)
    assert float(objective.similarity(X, Y, noise())) == pytest.approx(1)


# -- what it does to a network -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_regularizing_ligs_raises_it_and_the_accuracy_under_attack_at_a_small_cost_in_clean_accuracy(seed):
    """Paper D, fig. 5; on 8x8 digits a deviation of 0.01 sees nothing, so it is 0.1 here."""
    x, y = digits("test")
    attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=10)

    def measures(model: nn.Module) -> tuple[float, float, float]:
        similarity = LIGS(Standard(model), size=0.1).similarity(x, y, ImageNoise(1, torch.arange(len(x))))
        return accuracy(model, x, y), float(similarity), accuracy(model, attack(model, x, y), y)

    plain = measures(train(12, seed=seed))
    found = measures(train(12, seed=seed, wrap=lambda inner: LIGS(inner, weight=0.5, size=0.1)))
    assert found[0] > plain[0] - 0.04 and found[0] > 0.95
    assert found[1] > plain[1] + 0.02
    assert found[2] > plain[2] + 0.06
