"""Learning rates by step, compared with torch's schedulers."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from advnorm.config.fields import ScheduleName, TrainingSettings
from advnorm.training.schedule import learning_rate


def torch_rates(make, steps: int, lr: float) -> list[float]:
    """The rates that a scheduler of torch gives to steps 0, 1, …"""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make(optimizer)
    rates = []
    for i in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if i + 1 < steps:
            scheduler.step()
    return rates


def our_rates(steps: int, *, steps_per_epoch: int, **settings) -> list[float]:
    return [learning_rate(TrainingSettings(**settings), step, steps_per_epoch) for step in range(steps)]


@pytest.mark.parametrize("epochs", [1, 2, 7])
@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("milestones", [[], [1], [2, 3, 6], [0, 4]])
@pytest.mark.parametrize("gamma", [0.1, 0.5])
def test_step_equals_multi_step_lr(epochs, steps, milestones, gamma):
    def make(optimizer):
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, sorted(m * steps for m in milestones if m), gamma)

    options = {"schedule": "step", "lr": 0.1, "epochs": epochs, "steps_per_epoch": steps, "gamma": gamma}
    expected = torch_rates(make, epochs * steps, 0.1 * gamma ** (0 in milestones))
    assert our_rates(epochs * steps, milestones=milestones, **options) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("steps", [3, 7, 10, 30, 49, 100, 391])
def test_a_milestone_within_an_epoch_is_met_at_its_step(steps):
    for k in range(1, steps):
        settings = TrainingSettings(schedule="step", lr=1.0, epochs=1, milestones=(k / steps,))
        assert [learning_rate(settings, step, steps) for step in (k - 1, k)] == [1.0, 0.1]


@pytest.mark.parametrize("epochs", [1, 2, 7])
@pytest.mark.parametrize("steps", [1, 3, 8])
def test_cosine_equals_cosine_annealing_lr(epochs, steps):
    total = epochs * steps
    expected = torch_rates(lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=total), total, 0.1)
    found = our_rates(total, schedule="cosine", lr=0.1, epochs=epochs, steps_per_epoch=steps)
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-12)  # torch multiplies from step to step


@pytest.mark.parametrize("epochs", [1, 2, 7])
@pytest.mark.parametrize("steps", [2, 3, 8, 17])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.456, 0.9, 1.0])
@pytest.mark.parametrize("lr", [0.1, 0.21])
def test_one_cycle_equals_one_cycle_lr(epochs, steps, share, lr):
    total = epochs * steps

    def make(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=lr, total_steps=total, pct_start=share, anneal_strategy="cos", cycle_momentum=False
        )

    found = our_rates(total, schedule="one_cycle", lr=lr, epochs=epochs, steps_per_epoch=steps, peak_share=share)
    assert found == pytest.approx(torch_rates(make, total, lr), rel=1e-12, abs=1e-15)


def test_one_cycle_whose_peak_is_the_first_step_starts_at_the_peak():
    assert learning_rate(TrainingSettings(schedule="one_cycle", lr=0.1, epochs=1, peak_share=0.1), 0, 10) == 0.1


def test_warm_up_rises_in_a_line_and_then_the_schedule_begins():
    options = {"lr": 0.4, "epochs": 4, "steps_per_epoch": 4, "warmup_epochs": 1.0}
    for schedule in ("constant", "step", "cosine"):
        rates = our_rates(16, schedule=schedule, milestones=[2], **options)
        assert rates[:5] == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4])
    make = torch.optim.lr_scheduler.CosineAnnealingLR
    assert our_rates(16, schedule="cosine", **options)[4:] == pytest.approx(
        torch_rates(lambda o: make(o, T_max=12), 12, 0.4), rel=1e-9
    )
    assert our_rates(16, schedule="step", milestones=[0.5, 2], **options) == pytest.approx(
        [0.1, 0.2, 0.03, *[0.04] * 5, *[0.004] * 8]
    )


@pytest.mark.parametrize("schedule", get_args(ScheduleName))
def test_the_rate_is_positive_at_every_step_of_a_run(schedule):
    rates = our_rates(60, schedule=schedule, lr=0.1, epochs=6, steps_per_epoch=10, milestones=[2, 4.5])
    assert 0 < min(rates) <= max(rates) <= 0.1
