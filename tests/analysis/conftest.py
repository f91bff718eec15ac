"""Networks trained on digits in a second, and a check that an analysis leaves a model unchanged."""

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
from advnorm.norms import routed_modules
from advnorm.objectives import Hybrid


@dataclass(frozen=True)
class Digits:
    """Networks by norm, in eval mode, and test images."""

    networks: dict[str, nn.Module]
    x: Tensor
    y: Tensor

    def target(
        self, norm: str, images: Tensor | None = None, labels: Tensor | None = None, **settings: Any
    ) -> EvaluationTarget:
        attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=2)
        data = (self.x if images is None else images, self.y if labels is None else labels)
        usual = {"name": norm, "model": self.networks[norm], "data": data, "attack": attack, "batch_size": 64}
        return EvaluationTarget(**{**usual, **settings})


@pytest.fixture(scope="session")
def digits() -> Digits:
    """Networks with ``bn``, ``dual_bn`` (each branch trained on its own images) and ``none``, which is worse."""
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
    """Scope: a model must stay unchanged bit for bit: tensors, versions, gradients, flags and random state."""

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
    """Check that the texts of a drawn figure lie inside it and do not overlap."""

    def check(figure: Any, texts: Any) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        FigureCanvasAgg(figure).draw()
        boxes = [text.get_window_extent() for text in texts]
        assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1 for box in boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])

    return check


@pytest.fixture
def updated_once() -> Callable[..., nn.Module]:
    """Make a network whose running statistics are those of one training step, and whose affine banks differ."""

    def make(norm: str, x: Tensor, x_adv: Tensor, layout: str) -> nn.Module:
        torch.manual_seed(0)
        model = advnorm.create_model("small_cnn", num_classes=10, norm=norm, in_channels=1, normalize=False)
        for module in routed_modules(model).values():
            module.momentum = 1.0
            for parameter in module.parameters():
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
        attack = PGD(threat=advnorm.ThreatModel(eps=0.1), steps=1)
        Hybrid(model.train(), attack).domain_logits({"clean": x, "adv": x_adv}, layout)
        return model

    return make
