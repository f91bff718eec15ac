"""Cross-AT and Cross-Hybrid-AT in deeper networks: paper A's description layer by layer, and what depth does to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import advnorm
from advnorm.attacks import PGD
from advnorm.data.digits import digits
from advnorm.norms import make_norm, routed_modules
from advnorm.objectives import Cross, Hybrid, Objective
from advnorm.threat import ThreatModel
from advnorm.training.bank_usage import leaves_banks_unused, routing
from support.norm_oracles import randomized
from support.objective_oracles import Given, crafted

EXACT = {"rtol": 1e-9, "atol": 1e-9}
LAYERS, CHANNELS = 6, 5


class Deep(nn.Module):
    """Convolutions with a norm each, residual from the second on; then the mean over positions and a linear layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(CHANNELS if n else 2, CHANNELS, 3, padding=1) for n in range(LAYERS))
        self.norms = nn.ModuleList(make_norm("cross_bn", CHANNELS, **options) for _ in range(LAYERS))
        self.head = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for conv, norm in zip(self.convs, self.norms):
            out = norm(conv(x)).relu()
            x = x + out if x.shape == out.shape else out
        return self.head(x.mean((2, 3)))


#: Where the AP of BN_clean and of BN_adv is stored: under the name of the branch that trains it.
AP = {"clean": "adv", "adv": "clean"}


class Branches:
    """Fig. 1 and sec. 3 of paper A by hand: two modules BN_clean and BN_adv per layer, each with NS and AP of its own.

    Every image goes through one of them from the first layer to the last. A module has the statistics of its own
    domain's images, which go through it too.
    """

    def __init__(self, model: Deep, *, constant: bool) -> None:
        self.state = {
            k: v.detach().clone().requires_grad_(v.is_floating_point()) for k, v in model.state_dict().items()
        }
        self.running = {k: v.detach().clone() for k, v in model.state_dict().items() if "running" in k or "num_" in k}
        self.eps, self.momentum, self.constant = 1e-5, 0.1, constant

    def logits(self, module: str, own: Tensor, crossed: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the module's own images and of the other domain's, both through ``BN_module``."""
        for layer in range(LAYERS):
            weight, bias = self.state[f"convs.{layer}.weight"], self.state[f"convs.{layer}.bias"]
            before, others = F.conv2d(own, weight, bias, padding=1), F.conv2d(crossed, weight, bias, padding=1)
            mean = before.mean((0, 2, 3), keepdim=True)
            var = ((before - mean) ** 2).mean((0, 2, 3), keepdim=True)
            self._record(module, layer, mean, var, before.numel() // CHANNELS)
            after = self._normalized(module, layer, before, mean, var)
            if self.constant:
                mean, var = mean.detach(), var.detach()
            others = self._normalized(module, layer, others, mean, var)
            own = own + after if layer else after
            crossed = crossed + others if layer else others
        weight, bias = self.state["head.weight"], self.state["head.bias"]
        return own.mean((2, 3)) @ weight.T + bias, crossed.mean((2, 3)) @ weight.T + bias

    def _normalized(self, module: str, layer: int, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Eq. 3, and the rectifier."""
        gamma, beta = (self.state[f"norms.{layer}.{k}_{AP[module]}"].view(1, -1, 1, 1) for k in ("weight", "bias"))
        return ((x - mean) / (var + self.eps) ** 0.5 * gamma + beta).clamp(min=0)

    @torch.no_grad()
    def _record(self, module: str, layer: int, mean: Tensor, var: Tensor, count: int) -> None:
        """Sec. 2.2: a running average of NS, of the unbiased variance."""
        fresh = {"running_mean": mean.flatten(), "running_var": var.flatten() * count / (count - 1)}
        for name, value in fresh.items():
            key = f"norms.{layer}.{name}_{module}"
            self.running[key] = (1 - self.momentum) * self.running[key] + self.momentum * value
        self.running[f"norms.{layer}.num_batches_tracked_{module}"] += 1

    def gradient(self, name: str) -> Tensor:
        found = self.state[name].grad
        return torch.zeros_like(self.state[name]) if found is None else found


def deep(seed: int = 0, **options: Any) -> Deep:
    model = randomized(Deep(**options).double(), seed)
    with torch.no_grad():
        for conv in model.convs:
            conv.weight *= 3
    return model.train()


@pytest.mark.parametrize("statistics", ["differentiated", "constant"])
@pytest.mark.parametrize("method", ["Cross-AT", "Cross-Hybrid-AT"])
def test_a_step_is_the_papers_description_layer_by_layer(method, statistics):
    constant = statistics == "constant"
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(7, 2, 5, 5, generator=generator), torch.randint(3, (7,), generator=generator)
    model = deep(other_gradient=not constant)
    oracle = Branches(model, constant=constant)
    clean, adv = x.double(), crafted(x).double()

    forwarded, crossed = oracle.logits("clean", clean, adv)  # the adversarial branch is normalized by BN_clean
    expected = F.cross_entropy(crossed, y)
    logits = {"clean": forwarded, "adv": crossed}
    if method == "Cross-Hybrid-AT":  # and the clean one by BN_adv; eq. 2 with α = 0.3
        _, logits["clean"] = oracle.logits("adv", adv, clean)
        expected = 0.3 * F.cross_entropy(logits["clean"], y) + 0.7 * expected
    expected.backward()

    objective = Hybrid(model, Given(), clean_weight=0.3) if method == "Cross-Hybrid-AT" else Cross(model, Given())
    step = objective(x, y)
    step.loss.backward()
    torch.testing.assert_close(step.loss, expected, **EXACT)
    torch.testing.assert_close(step.logits, logits, **EXACT)
    for name, parameter in model.named_parameters():
        found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found, oracle.gradient(name), **EXACT, msg=lambda m, name=name: f"{name}: {m}")
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, oracle.running[name], **EXACT, msg=lambda m, name=name: f"{name}: {m}")


def test_at_test_time_bn_clean_is_the_branch_that_adversarial_images_train():
    """Table 2 tests Cross-Hybrid-AT with BN_clean: clean statistics, and the AP that the adversarial branch trained."""
    model = deep(momentum=1.0)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(64, 2, 5, 5, generator=generator), torch.randint(3, (64,), generator=generator)
    with torch.no_grad():
        trained = Hybrid(model, Given())(x, y).logits
        through = Cross(model, Given())(x, y).logits["clean"]  # clean images through BN_clean
    model.eval()
    for images, expected, branch in (
        (crafted(x), trained["adv"], "adv"),
        (x, through, "adv"),
        (x, trained["clean"], "clean"),
    ):
        with torch.no_grad(), advnorm.route(model, branch):
            torch.testing.assert_close(model(images), expected, rtol=0.0, atol=0.02)  # var is stored unbiased


def test_the_record_names_the_banks_of_each_domain():
    crossed = {"normalized_by": "clean", "feed": "adv", "scaled_by": "adv"}
    (hybrid,) = routing(Hybrid(deep(), Given()))
    assert hybrid["layers"] == LAYERS and hybrid["domains"] == {
        "clean": {"normalized_by": "adv", "feed": "clean", "scaled_by": "clean"},
        "adv": crossed,
    }
    (cross,) = routing(Cross(deep(), Given()))
    assert cross["domains"] == {
        "clean": {"normalized_by": "clean", "feed": "clean", "scaled_by": "adv"},
        "adv": {**crossed, "feed": None},
    }
    assert leaves_banks_unused(Cross(deep(), Given())) and not leaves_banks_unused(Hybrid(deep(), Given()))


@pytest.mark.parametrize(("statistics", "forwards"), [("batch", 2), ("running", 1)])
def test_images_are_forwarded_for_their_statistics_only_if_these_are_used(statistics, forwards):
    model, rows = deep(), list[int]()
    model.register_forward_pre_hook(lambda _, images: rows.append(len(images[0])))
    Hybrid(model, Given(), statistics=statistics)(torch.rand(6, 2, 5, 5), torch.arange(6) % 3)
    assert rows == [forwards * 2 * 6]


# -- depth -------------------------------------------------------------------------------------------------------------


def resnet(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    settings = {"width": 0.125, "in_channels": 1, "normalize": False}
    return advnorm.create_model("resnet18", norm="cross_bn", norm_options=options, **settings)


def attack() -> PGD:
    return PGD(threat=ThreatModel(eps="16/255"), steps=1, step_size="16/255")


def variance_ratios(objective: Objective, x: Tensor, y: Tensor) -> dict[str, float]:
    """For every norm, in one step, by which factor crossed images' variances differ from those that normalize them."""
    found: dict[str, float] = {}

    def seen(name: str) -> Any:
        def hook(norm: Any, args: tuple[Tensor]) -> None:
            first, then = dict(norm.state.forwarded), dict(norm.state.route)
            if None in then.values():  # the attack's forwards
                return
            sizes = [*first.values(), *then.values()]
            variance = [part.detach().double().var((0, 2, 3)) for part in args[0].split(sizes)]
            own, crossed = dict(zip(first, variance)), dict(zip(then, variance[len(first) :]))
            ratios = torch.stack([crossed["adv"] / own["clean"], crossed["clean"] / own["adv"]])
            found[name] = float(ratios.log().mean(1).abs().max().exp())

        return hook

    handles = [norm.register_forward_pre_hook(seen(name)) for name, norm in routed_modules(objective.model).items()]
    objective(x, y, index=torch.arange(len(x)))
    for handle in handles:
        handle.remove()
    return found


def test_the_variances_of_crossed_images_stay_those_of_their_bank_through_the_depth_of_a_network():
    """Normalized by each other's moments of one forward, their ratio would about square at each of the 20 norms."""
    x, y = digits("train")
    ratios = variance_ratios(Hybrid(resnet(), attack()), x[:64], y[:64])
    assert len(ratios) == 20
    assert max(ratios.values()) < 1.5, ratios


def loss_and_growth(steps: int, objective: Objective) -> tuple[float, float]:
    """At twice paper A's learning rate, the mean of the last five losses and the factor by which the weights grow."""
    x, y = digits("train")
    weights = [p for p in objective.model.parameters() if p.dim() == 4]
    before = torch.cat([weight.detach().flatten() for weight in weights]).norm()
    optimizer = torch.optim.SGD(objective.model.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    generator, losses = torch.Generator().manual_seed(0), []
    for step in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        loss = objective(x[rows], y[rows], index=rows + step * len(x)).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = torch.cat([weight.detach().flatten() for weight in weights]).norm()
    return sum(losses[-5:]) / 5, (after / before).item()


@pytest.mark.parametrize("kind", [Hybrid, Cross])
def test_a_deep_network_learns_at_a_high_rate_and_slowly_with_constant_statistics(kind):
    """From 2.5, as with Dual BN. With constant statistics the weights grow (Ioffe & Szegedy 2015, sec. 2, say why)."""
    loss, growth = loss_and_growth(30, kind(resnet(), attack()))
    slow, fast_growth = loss_and_growth(30, kind(resnet(other_gradient=False), attack()))
    assert loss < 1 and 1.5 < slow < 2.5
    assert growth < 1.6 and 2 < fast_growth < 3
