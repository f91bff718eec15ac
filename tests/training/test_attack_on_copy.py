"""The attack on a folded copy is as strong as the attack on the network, and falls back to it."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

from advnorm import ThreatModel, convert_norm, strip
from advnorm.attacks import PGD, predicting
from advnorm.attacks.folded_copy import FoldedCopy, make_folded_copy
from advnorm.norms import routed_modules
from advnorm.objectives import Execution, Hybrid, Objective
from advnorm.training.attack_on_copy import AttackOnCopy, copy_branch, make_attack_on_copy, perturbed
from advnorm.training.loop import TrainingLoop
from support.step_programs import CASES, adversarial, first_batch, gradients_of, loop_of, snapshot, steps

FALLBACK = "the attack uses the network itself, not a fast copy: "


def attack_on_copy(objective: Objective, messages: list[str], copy: FoldedCopy | None = None) -> AttackOnCopy:
    """The attack on a copy that is not compiled, which would take seconds."""
    copy = copy or copy_branch(objective, messages.append)
    assert copy is not None
    return AttackOnCopy(objective, Execution(surrogate=copy), copy, messages.append)


@pytest.mark.parametrize("case", ["hybrid", "single", "shared affine", "heads", "shortcuts", "preact", "trades"])
def test_an_attack_on_the_copy_is_as_strong_and_changes_nothing_in_the_network(tmp_path, case):
    settings = CASES[case]
    reference, loop = (loop_of(tmp_path, precision=p, lr=0.1, **settings) for p in ("float32", "bf16"))
    steps(reference, 8)
    loop.model.load_state_dict(reference.model.state_dict())
    craft = attack_on_copy(loop.objective, [])
    assert craft.copy is not None and craft.copy.folded
    before, x = snapshot(loop), first_batch(loop).x
    found = adversarial(loop, craft)
    assert craft.execution.surrogate is craft.copy, "the copy was left"
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    assert all(module.state.route is None for module in routed_modules(loop.model).values())
    radius = 8 / 255
    assert (found - x).abs().max() <= radius and found.min() >= 0 and found.max() <= 1
    losses = [_loss(reference, images) for images in (x, found, adversarial(reference))]
    assert losses[1] == pytest.approx(losses[2], rel=0.01) and losses[1] > losses[0]


def _loss(loop: TrainingLoop, images: torch.Tensor) -> float:
    """The loss that the attack maximizes, in float32, through the branch it attacks."""
    batch = first_batch(loop)
    with predicting(loop.model, route=loop.objective.attack_route) as predict, torch.no_grad():
        if loop.config.objective.name == "trades":
            clean, adv = predict(batch.x).log_softmax(1), predict(images).log_softmax(1)
            return torch.nn.functional.kl_div(adv, clean, log_target=True, reduction="batchmean").item()
        return torch.nn.functional.cross_entropy(predict(images), batch.y).item()


@pytest.mark.parametrize(
    "settings",
    [
        *(CASES[case] for case in ("mixture", "groups", "standard")),
        {"attack": {"steps": 2, "step_size": "4/255", "statistics": "batch_frozen"}},
    ],
    ids=["mixture", "groups", "standard", "batch statistics"],
)
def test_there_is_no_copy_where_it_gains_nothing(tmp_path, settings):
    loop = loop_of(tmp_path, precision="bf16", **settings)
    assert make_attack_on_copy(loop.objective, Execution(), print) is None


def test_a_copy_that_disagrees_is_not_used_and_the_log_says_so(tmp_path):
    loop, messages = loop_of(tmp_path, precision="bf16"), []
    craft = attack_on_copy(loop.objective, messages)
    copy = craft.copy
    refresh = copy.refresh

    def wrong() -> None:
        refresh()
        copy._parts[-1].bias.add_(3)

    copy.refresh = wrong
    assert torch.equal(adversarial(loop, craft), adversarial(loop_of(tmp_path, precision="bf16")))
    assert craft.execution.surrogate is None and len(messages) == 1
    assert messages[0].startswith(f"{FALLBACK}its logits differ by")


def test_a_copy_that_raises_is_not_used_and_the_log_says_so(tmp_path):
    loop, messages = loop_of(tmp_path, precision="bf16"), []

    def odd(x):
        raise TypeError("an odd model")

    craft = AttackOnCopy(loop.objective, Execution(surrogate=odd), copy_branch(loop.objective, print), messages.append)
    expected = adversarial(loop_of(tmp_path, precision="bf16"))
    for _ in range(2):
        assert torch.equal(adversarial(loop, craft), expected)
    assert messages == [f"{FALLBACK}an odd model"]


class Masked(torch.nn.Module):
    """A network part of which passes no gradient on, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = (torch.nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.norm, self.head = torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.hidden(x)
        return self.head(self.norm(self.seen(x)).mul(hidden).mean((2, 3)))


class Hooked(torch.nn.Module):
    """A network whose output a hook scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)
        self.register_forward_hook(lambda module, args, out: 2 * out)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


BATCH = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8), torch.arange(8)


def hybrid(model: torch.nn.Module) -> Hybrid:
    convert_norm(model, "dual_bn")
    return Hybrid(model, PGD(threat=ThreatModel(eps="8/255"), steps=2))


@pytest.mark.parametrize(
    ("model", "reason"), [(Masked, "its gradients point elsewhere, cosine"), (Hooked, "a Hooked has hooks")]
)
def test_a_network_that_cannot_be_copied_is_attacked_itself_and_the_log_says_so(monkeypatch, model, reason):
    monkeypatch.setattr(torch, "compile", lambda eager, **_: eager)  # which takes seconds
    torch.manual_seed(0)
    objective, messages = hybrid(model()), []
    expected = objective.craft(*BATCH)
    craft = make_attack_on_copy(objective, Execution(), messages.append)
    assert craft is not None and not messages, "the folder of the log exists only when the training starts"
    for _ in range(2):
        assert torch.equal(craft(*BATCH), expected)
    assert len(messages) == 1 and messages[0].startswith(FALLBACK) and reason in messages[0]


class Centred(torch.nn.Module):
    """A network with a running mean of its own, which it puts in a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.mean = 0.7 * self.mean + 0.3 * x.detach().mean((0, 2, 3))
        return self.head(self.norm(self.conv(x - self.mean[:, None, None])).relu().mean((2, 3)))


def test_a_copy_is_left_when_the_model_assigns_new_tensors():
    torch.manual_seed(0)
    objective, messages = hybrid(Centred()), []
    craft = attack_on_copy(objective, messages)
    craft(*BATCH)
    assert craft.execution.surrogate is not None and not messages
    objective.train()
    objective(*BATCH[:2], index=BATCH[2])
    assert not messages
    for _ in range(2):
        craft(*BATCH)
    assert craft.execution.surrogate is None
    assert messages == [f"{FALLBACK}the model has assigned a new tensor to mean; change it in place"]
    assert torch.equal(craft(*BATCH), objective.craft(*BATCH))


def test_a_copy_of_the_wrong_bank_is_found_before_the_banks_differ(tmp_path):
    loop, messages = loop_of(tmp_path), []
    wrong = make_folded_copy(strip(loop.model, "clean", linked=True).eval())
    assert wrong is not None
    craft = attack_on_copy(loop.objective, messages, wrong)
    x = first_batch(loop).x
    with predicting(loop.model, route="adv") as predict, torch.no_grad():
        torch.testing.assert_close(wrong(x), predict(x), rtol=0.05, atol=0.01)  # so far it is right
    adversarial(loop, craft)
    assert craft.execution.surrogate is None and "its logits differ by" in messages[0]


def test_the_check_of_a_copy_changes_nothing(tmp_path):
    loop, messages = loop_of(tmp_path, precision="bf16", lr=0.1), []
    steps(loop, 2)
    craft = attack_on_copy(loop.objective, messages)
    before, gradients, state = snapshot(loop), gradients_of(loop), torch.get_rng_state()
    adversarial(loop, craft)
    assert not messages
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert all(torch.equal(gradients[name], value) for name, value in gradients_of(loop).items())
    assert torch.equal(torch.get_rng_state(), state)


def test_perturbed_tensors_have_their_own_bits_again():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    torch.nn.init.zeros_(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with suppress(KeyError), perturbed(model):
        for name, value in model.state_dict().items():
            assert value.is_floating_point() == bool((value != before[name]).all()), name
        assert (model[1].running_var > 0).all()
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_tensors_without_a_place_for_each_number_are_not_perturbed():
    model = torch.nn.BatchNorm2d(2)
    model.register_buffer("memory", torch.empty(0, 8))
    model.register_buffer("scale", torch.ones(1).expand(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with perturbed(model):
        assert torch.equal(model.scale, torch.ones(3)) and (model.weight != 1).all()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
