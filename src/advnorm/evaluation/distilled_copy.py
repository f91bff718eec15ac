"""A smooth copy of a model, trained on the model's answers alone, from which attacks transfer.

Source: Papernot et al. 2017, "Practical black-box attacks against machine learning": the copy learns the answers at the
images, around them, and at its own adversarial images, where it still differs from the model.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm._core.memory import AdaptiveBatchSize
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD
from advnorm.data.gather import spread_rows
from advnorm.evaluation.plan import EvaluationPlan
from advnorm.evaluation.reference_logits import are_probabilities
from advnorm.models import create_model

#: Random points in the ball of each image, and rounds of training, each followed by attacks on the copy.
DRAWS, ROUNDS = 10, 8
LOSSES: tuple[Literal["ce", "cw"], ...] = ("ce", "cw")
ATTACK_STEPS = 20
#: Passes over the points per round, points per step, and the peak learning rate of Adam.
EPOCHS, BATCH_SIZE, LEARNING_RATE = 15, 256, 3e-3
#: The median difference of the two largest logits is at least this: smaller ones would teach little.
LOGIT_GAP = 3.0
#: Smallest side of images for a convolutional copy; others get a perceptron of this width.
CONVOLVED_SIDE, WIDTH = 16, 256
#: Most pixels of all points together (1 GiB); of larger data fewer images are used.
MOST_PIXELS = 2**28


def distill(plan: EvaluationPlan, route: str | None) -> nn.Module:
    """Return a copy of a branch of the plan's model. It depends on the model's answers and on the plan's seed only."""
    points_per_image = 1 + DRAWS + ROUNDS * len(LOSSES)
    rows = spread_rows(len(plan.images), max(2, MOST_PIXELS // (points_per_image * plan.images[0].numel())))
    x, y, index = (part[rows].to(plan.device) for part in (plan.images, plan.labels, plan.index))
    memory = AdaptiveBatchSize(plan.batch_size, minimum=plan.forward.minimum_batch)

    def answer(points: Tensor, turn: int) -> Tensor:
        with plan.forward.through(route, "copy", turn) as predict:
            return _shares(torch.cat(memory.map(len(points), lambda part: predict(points[part]))))

    with plan.forward.seeded(route, "train the copy"), torch.enable_grad():
        noise = ImageNoise(plan.seed, index).fold("copy")
        points = torch.cat([x, *(plan.threat.random_start(x, noise.fold(draw)) for draw in range(DRAWS))])
        shares = answer(points, 0)
        copy = _network(x, shares.shape[1])
        for turn in range(1, ROUNDS + 1):
            _fit(copy, points, shares)
            seed = (plan.seed + turn) % 2**31
            attacks = [PGD(threat=plan.threat, steps=ATTACK_STEPS, loss=loss, seed=seed) for loss in LOSSES]
            found = torch.cat([attack(copy, x, y, index=index) for attack in attacks])
            points, shares = torch.cat([points, found]), torch.cat([shares, answer(found, turn)])
        _fit(copy, points, shares)
    return copy.eval()


def _shares(logits: Tensor) -> Tensor:
    """Return probabilities of the classes, whatever the scale of the logits."""
    if are_probabilities(logits):
        return logits
    top = logits.topk(2, dim=1).values
    gap = (top[:, 0] - top[:, 1]).nanmedian()
    shares = (logits * (LOGIT_GAP / gap.clamp_min(1e-12)).clamp_min(1)).softmax(1)
    return torch.where(shares.isfinite().all(1, keepdim=True), shares, 1 / shares.shape[1])


def _network(x: Tensor, classes: int) -> nn.Module:
    if x.dim() == 4 and min(x.shape[2:]) >= CONVOLVED_SIDE:
        options = {"in_channels": x.shape[1], "norm": "gn", "width": 2.0, "activation": "silu"}
        return create_model("small_cnn", num_classes=classes, **options).to(x.device)
    hidden = (nn.Linear(x[0].numel(), WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH), nn.SiLU())
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(WIDTH, classes)).to(x.device)


def _fit(copy: nn.Module, points: Tensor, shares: Tensor) -> None:
    """Train with a learning rate that falls linearly to 0."""
    optimizer = torch.optim.Adam(copy.parameters(), LEARNING_RATE)
    steps = math.ceil(EPOCHS * len(points) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for _ in range(steps):
        rows = torch.randint(len(points), (BATCH_SIZE,), device=points.device)
        optimizer.zero_grad()
        F.cross_entropy(copy(points[rows]), shares[rows]).backward()
        optimizer.step()
        schedule.step()
