"""The projection onto the intersection of the L1 ball and the box."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from advnorm._core.seeding import ImageNoise
from advnorm.attacks.geometry import project_l1_and_box


@given(seed=st.integers(0, 10**6), eps=st.floats(0.01, 30), spread=st.floats(0.01, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_l1_projection_is_the_nearest_point_of_both(seed, eps, spread):
    noise = ImageNoise(seed, torch.arange(4))
    x = (1.4 * noise.uniform((1, 4, 5), "x") - 0.2).clamp(0, 1)
    point = x + spread * noise.normal((1, 4, 5), "point")
    nearest = project_l1_and_box(x, point, eps)
    assert nearest.min() >= 0 and nearest.max() <= 1
    assert ((nearest - x).abs().flatten(1).sum(1) <= eps * (1 + 1e-5) + 1e-6).all()
    # p is the nearest point of a convex set if and only if (point - p)·(z - p) <= 0 for every z in the set.
    for draw in range(40):
        direction = noise.normal((1, 4, 5), draw) * (noise.uniform((1, 4, 5), f"mask {draw}") < 0.3)
        other = (x + direction).clamp(0, 1) - x
        length = other.abs().flatten(1).sum(1).clamp_min(1e-12)
        z = x + other * (eps / length).clamp_max(1).view(-1, 1, 1, 1)
        for towards in (z, nearest + 1e-2 * (z - nearest), x):
            product = ((point - nearest) * (towards - nearest)).double().flatten(1).sum(1)
            assert (product <= 2e-5 * max(1, eps) * max(1, spread)).all()


def test_the_l1_projection_leaves_what_is_inside_alone():
    x = torch.full((2, 1, 3, 3), 0.5)
    point = x + torch.tensor([0.01, -0.02])[:, None, None, None]
    assert torch.allclose(project_l1_and_box(x, point, 1.0), point, atol=1e-7)
    assert torch.equal(project_l1_and_box(x, x, 1.0), x)
