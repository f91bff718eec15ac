"""Training steps on a confident network, against float64: on CUDA compiled and replayed as graphs (trap 25)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from advnorm import ThreatModel
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import FGSM, PGD
from advnorm.objectives import LIGS, Classical
from advnorm.training.cuda_graphs import WARM_UP, CapturedAttack
from advnorm.training.ranks import Ranks
from advnorm.training.step_program import CapturedProgram, make_step_program
from support.confident import DEVICES, confident_network, exact_direction, margins

FGSM_STEP = FGSM(threat=ThreatModel(eps=0.2))
PGD_STEPS = PGD(threat=ThreatModel(eps=0.15), steps=10, step_size=0.0375, start="clean")
WEIGHT, SIZE = 3.0, 0.05


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("attack", "share"), [(FGSM_STEP, 1e-3), (PGD_STEPS, 0.01)], ids=["fgsm", "pgd"])
@pytest.mark.parametrize("regularized", [True, False], ids=["ligs", "alone"])  # only a loss alone is replayed as well
def test_a_step_attacks_and_evaluates_a_confident_network_as_float64_does(
    monkeypatch, device, attack, share, regularized
):
    model, x, y = confident_network(device)
    index = torch.arange(len(x), device=device) + 7
    objective = Classical(copy.deepcopy(model).requires_grad_(), attack)
    objective = LIGS(objective, weight=WEIGHT, size=SIZE) if regularized else objective
    messages, crafted, craft_batch = [], [], objective.craft_batch
    monkeypatch.setattr(objective, "craft_batch", lambda *args: crafted.append(craft_batch(*args)) or crafted[-1])
    on_cuda = device == "cuda"
    ranks = Ranks(device=torch.device(device))
    program = make_step_program(objective, ranks, messages.append, compiled=on_cuda, precision="float32")
    with program.scope():
        for _ in range(WARM_UP + 1 if on_cuda else 0):  # with other inputs, up to the captures
            program(x.flip(0), y.flip(0), index.flip(0))
        replays = [program.execution.craft.replays] if isinstance(program.execution.craft, CapturedAttack) else []
        replays += [program.captured.replays] if isinstance(program, CapturedProgram) else []
        assert len(replays) == (0 if not on_cuda else 1 if regularized else 2)
        graphs = [part.replay for part in replays]
        output = program(x, y, index)
    # Each of them has a graph before the last call, and used it.
    assert None not in graphs and graphs == [part.replay for part in replays] and not messages

    expected = x
    for _ in range(attack.steps):
        step = attack.step * exact_direction(model, expected, y).sign().float()
        expected = attack.threat.project(expected + step, x)
    x_adv = crafted[-1].x_adv
    assert (x_adv - expected).abs().gt(1e-5).double().mean() < share  # components of the gradient near zero
    loss = F.softplus(-margins(model, x_adv, y)).mean()
    if regularized:
        near = x + SIZE * ImageNoise(0, index).fold("ligs").normal(x.shape[1:], "ligs")
        similarity = (exact_direction(model, x, y) * exact_direction(model, near, y)).flatten(1).sum(1).mean()
        assert output.terms["ligs"].item() == pytest.approx(similarity.item(), abs=1e-5)
        loss = loss + WEIGHT * (1 - similarity)
    assert output.loss.item() == pytest.approx(loss.item(), rel=1e-5)
