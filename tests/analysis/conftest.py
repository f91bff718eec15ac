"""Networks trained on digits in a second, and what must not change while they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import advnorm
from advnorm.attacks import PGD
from advnorm.evaluation import EvaluationTarget


@dataclass(frozen=True)
class Digits:
    """Networks by norm, in eval mode, and images that they have not seen."""

    networks: dict[str, nn.Module]
    x: Tensor
    y: Tensor

    def subject(
        self, norm: str, images: Tensor | None = None, labels: Tensor | None = None, **settings: Any
    ) -> EvaluationTarget:
        attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=2)
        data = (self.x if images is None else images, self.y if labels is None else labels)
        usual = {"name": norm, "model": self.networks[norm], "data": data, "attack": attack, "batch_size": 64}
        return EvaluationTarget(**{**usual, **settings})


@pytest.fixture(scope="session")
def digits() -> Digits:
    """``bn``, ``dual_bn`` (each branch trained on images of its own) and ``none``; the first two are good."""
    train, test = (advnorm.data.load("digits", part) for part in ("train", "test"))
    x, y = train.pixels(slice(0, None)), train.labels
    networks = {}
    with torch.random.fork_rng([]):
        for norm in ("bn", "dual_bn", "none"):
            torch.manual_seed(0)
            model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
            optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
            for epoch in range(4):
                for rows in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(128):
                    half = len(rows) // 2
                    with advnorm.route(model, {"clean": half, "adv": len(rows) - half}):
                        images = torch.cat([x[rows[:half]], (x[rows[half:]] + 0.3 * torch.rand(1, 8, 8)).clamp(0, 1)])
                        loss = F.cross_entropy(model(images), y[rows])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
            optimizer.zero_grad()
            networks[norm] = model.eval()
    return Digits(networks, test.pixels(slice(0, 300)), test.labels[:300])


@pytest.fixture
def untouched() -> Callable[..., Any]:
    """Scope in which a model must stay bit for bit as it was: tensors, versions, gradients, flags and random state."""

    def state(model: nn.Module) -> tuple[list[Any], list[Tensor]]:
        held = [*model.state_dict(keep_vars=True).values()]
        facts = [[t._version for t in held], [m.training for m in model.modules()]]
        facts += [[(p.requires_grad, p.grad is None) for p in model.parameters()], [id(p) for p in model.parameters()]]
        facts += [sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())]
        tensors = [t.detach().clone() for t in [*held, *(p.grad for p in model.parameters() if p.grad is not None)]]
        return facts, [*tensors, torch.get_rng_state()]

    @contextmanager
    def scope(model: nn.Module) -> Iterator[None]:
        facts, tensors = state(model)
        yield
        facts_after, tensors_after = state(model)
        assert facts_after == facts
        assert all(torch.equal(a, b) for a, b in zip(tensors, tensors_after, strict=True))

    return scope


@pytest.fixture
def apart() -> Callable[..., None]:
    """That the texts of a figure, as it is drawn, lie inside of it and do not touch each other."""

    def check(figure: Any, texts: Any) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        FigureCanvasAgg(figure).draw()
        boxes = [text.get_window_extent() for text in texts]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])

    return check
