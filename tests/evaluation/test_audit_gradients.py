"""Gradients of an audited model against derivatives by hand."""

import pytest
import torch
from torch import Tensor, nn

import advnorm
from advnorm.evaluation.audit_gradients import measure_gradients
from advnorm.evaluation.plan import plan_evaluation

THREAT = advnorm.ThreatModel(eps=0.2)


class Quadratic(nn.Module):
    """Logits ``(0, x·Ax / 2)`` for a symmetric A; records its images."""

    def __init__(self) -> None:
        super().__init__()
        matrix = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
        self.matrix = nn.Parameter(matrix + matrix.T)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().clone())
        rows = x.flatten(1)
        return torch.stack([torch.zeros(len(x)), ((rows @ self.matrix) * rows).sum(1) / 2], 1)


def test_norms_and_angles_are_those_of_the_correct_images_and_of_a_point_a_tenth_of_eps_beside():
    generator = torch.Generator().manual_seed(1)
    x, y = torch.rand(12, 1, 4, 4, generator=generator), torch.zeros(12, dtype=torch.long)
    model, correct = Quadratic(), torch.arange(12) % 3 > 0
    plan = plan_evaluation(model, (x, y), THREAT, "pgd10")
    model.seen.clear()
    sample = measure_gradients(plan, None, correct, differentiable=True)
    beside, images = model.seen
    assert torch.equal(images, x[correct])
    distance = (beside - images).abs().amax((1, 2, 3))
    assert ((distance > 0.015) & (distance <= 0.02)).all()  # uniform in the cube: one of 16 pixels is near its face
    slopes = [points.double().flatten(1) @ model.matrix.double() for points in (images, beside)]
    share = sample.logits.double().softmax(1)[:, 1:]  # ∇ loss = p ∇z
    torch.testing.assert_close(sample.norms, (share * slopes[0]).norm(dim=1), rtol=1e-4, atol=1e-9)
    cosine = (slopes[0] * slopes[1]).sum(1) / slopes[0].norm(dim=1) / slopes[1].norm(dim=1)
    torch.testing.assert_close(sample.angles, cosine.arccos().rad2deg(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("right", "measured"), [(4, 4), (0, 6)])
def test_without_gradients_norms_and_angles_are_zero(right, measured):
    """Without correct images all images are measured."""
    x, y = torch.rand(6, 1, 4, 4), torch.zeros(6, dtype=torch.long)
    plan = plan_evaluation(Quadratic(), (x, y), THREAT, "pgd10")
    sample = measure_gradients(plan, None, torch.arange(6) < right, differentiable=False)
    assert not sample.norms.any() and not sample.angles.any()
    assert len(sample.logits) == len(sample.norms) == measured
