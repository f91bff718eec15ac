"""The threat model: names and numbers, and ball and box that hold exactly, as real numbers and in float32."""

from __future__ import annotations

import dataclasses
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.threat import THREAT_NORMS, ThreatModel, parse_length
from support.problems import raises_problem

EPS = ["8/255", "16/255", "1/255", 1e-4, 0.3, 0.5, 1.0, 0.0, 1e-9, 1e-30]
ORDER = {"Linf": math.inf, "L2": 2, "L1": 1}
quick = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

pixels = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 1e-30, 1e-45, 1 / 255, 254 / 255, float(np.nextafter(np.float32(1), 0))]),
    st.floats(0, 1, width=32),
)
images = hnp.arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 24)), elements=pixels)


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def assert_inside(threat: ThreatModel, x_adv: torch.Tensor, x: torch.Tensor) -> None:
    """Ball and box, as real numbers and by every float32 way that a user would check them."""
    assert x_adv.dtype == torch.float32 and x_adv.shape == x.shape
    assert x_adv.min() >= 0 and x_adv.max() <= 1
    assert (threat.distance(x_adv, x) <= threat.eps).all()
    order = ORDER[threat.norm]
    rows = (x_adv - x).flatten(1)
    assert torch.linalg.vector_norm(rows, order, dim=1).max().item() <= threat.eps
    if threat.norm == "Linf":
        assert (rows.abs() <= threat.eps).all()
        exact = [abs(Fraction(a) - Fraction(b)) for a, b in zip(x_adv.flatten().tolist(), x.flatten().tolist())]
        assert max(exact) <= Fraction(threat.eps)
    else:
        assert ((rows.abs() ** order).sum(1) ** (1 / order)).max().item() <= threat.eps


# -- names and numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "number"),
    [("8/255", 8 / 255), ("0.5", 0.5), (" 8 / 255 ", 8 / 255), ("1e-3", 1e-3), (0.25, 0.25), (1, 1)],
)
def test_eps_is_a_number_or_a_fraction(given, number):
    assert ThreatModel(norm="Linf", eps=given).eps == number == parse_length(given)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("eps", ["8/255", 0.1, 1 / 3])
def test_repr_rebuilds_it_and_copies_are_equal(norm, eps):
    threat = ThreatModel(norm=norm, eps=eps)
    assert eval(repr(threat)) == threat == pickle.loads(pickle.dumps(threat)) == dataclasses.replace(threat)
    assert hash(threat) == hash(eval(repr(threat)))
    assert dataclasses.replace(threat, eps="4/255") == ThreatModel(norm=norm, eps=4 / 255)
    with pytest.raises(dataclasses.FrozenInstanceError):
        threat.eps = 0.1  # type: ignore[misc]


def test_str_shows_the_fraction_that_a_user_would_type():
    assert str(ThreatModel(eps="8/255")) == "Linf eps=8/255"
    assert str(ThreatModel(norm="L2", eps=0.5)) == "L2 eps=0.5"
    for eps in ("0.3", "0.1", "0.2", "0.031", "1", "8.5/255", "16/255"):
        assert str(ThreatModel(eps=eps)) == f"Linf eps={eps}"


@pytest.mark.parametrize(
    ("eps", "code"),
    [
        (8, "out_of_range"),
        ("8", "out_of_range"),
        (-0.1, "out_of_range"),
        (math.nan, "out_of_range"),
        ("inf", "out_of_range"),
        ("eight", "wrong_type"),
        ("8/0", "wrong_type"),
        ("8/255/2", "wrong_type"),
        (None, "wrong_type"),
        (True, "wrong_type"),
    ],
)
def test_a_bad_eps_is_rejected(eps, code):
    with raises_problem(code, "eps"):
        ThreatModel(eps=eps)


def test_a_pixel_count_gets_the_fraction_as_hint():
    with raises_problem("out_of_range", "eps") as caught:
        ThreatModel(eps=8)
    assert "did you mean '8/255'?" in str(caught.value)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        ThreatModel(norm="L3", eps=-1)  # type: ignore[arg-type]
    assert [(problem.code, problem.field) for problem in caught.value.problems] == [
        ("unknown_name", "norm"),
        ("out_of_range", "eps"),
    ]


def test_l2_and_l1_may_exceed_one():
    assert ThreatModel(norm="L2", eps=3).eps == 3 and ThreatModel(norm="L1", eps=12).eps == 12


# -- ball and box ------------------------------------------------------------------------------------------------------


@quick
@given(x=images, eps=st.one_of(st.sampled_from(EPS), st.floats(0, 1)))
def test_linf_bounds_are_exact_and_tight(x, eps):
    threat = ThreatModel(eps=eps)
    x = tensor(x)
    low, high = threat.bounds(x)
    assert low.dtype == high.dtype == torch.float32
    for bound in (low, high):
        assert_inside(threat, bound, x)
    assert (low <= x).all() and (x <= high).all()
    radius = Fraction(threat.eps)
    for value, bottom, top in zip(x.flatten().tolist(), low.flatten().tolist(), high.flatten().tolist()):
        # one float32 further is outside of the box, of the ball, or of the float32 numbers up to eps
        beyond = float(np.nextafter(np.float32(top), np.float32(2)))
        assert beyond > 1 or Fraction(beyond) - Fraction(value) > _float32_below(radius)
        beyond = float(np.nextafter(np.float32(bottom), np.float32(-1)))
        assert beyond < 0 or Fraction(value) - Fraction(beyond) > _float32_below(radius)


def _float32_below(value: Fraction) -> Fraction:
    nearest = np.float32(float(value))
    return Fraction(float(nearest if Fraction(float(nearest)) <= value else np.nextafter(nearest, np.float32(0))))


@quick
@given(
    x=images,
    norm=st.sampled_from(THREAT_NORMS),
    eps=st.one_of(st.sampled_from(EPS), st.floats(0, 1)),
    scale=st.sampled_from([1e-6, 1e-3, 0.1, 1.0, 100.0]),
    seed=st.integers(0, 1000),
)
def test_a_second_projection_changes_nothing_and_the_first_lies_inside(x, norm, eps, scale, seed):
    threat = ThreatModel(norm=norm, eps=eps)
    x = tensor(x)
    far = x + scale * ImageNoise(seed, torch.arange(len(x))).normal(x.shape[1:])
    projected = threat.project(far, x)
    assert_inside(threat, projected, x)
    assert torch.equal(threat.project(projected, x), projected)
    assert torch.equal(threat.project(x, x), x)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("eps", ["8/255", 0.5, 1.0])
@pytest.mark.parametrize("shape", [(3, 8, 8), (3, 32, 32), (3, 224, 224)])
def test_projection_holds_in_float32_for_large_and_for_constant_images(norm, eps, shape):
    threat = ThreatModel(norm=norm, eps=eps)
    noise = ImageNoise(0, torch.arange(2))
    for x in (noise.uniform(shape), torch.full((2, *shape), 0.5), torch.zeros(2, *shape)):
        for delta in (noise.normal(shape), noise.signs(shape), 0.4 * noise.signs(shape), 0.01 * noise.signs(shape)):
            projected = threat.project(x + delta, x)
            rows = (projected - x).flatten(1)
            assert torch.linalg.vector_norm(rows, ORDER[norm], dim=1).max().item() <= threat.eps
            assert threat.distance(projected, x).max().item() <= threat.eps
            assert projected.min() >= 0 and projected.max() <= 1


@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_projection_is_the_nearest_point_of_the_ball(norm):
    """Against the float64 oracle: scaling for L2, soft thresholding by bisection for L1."""
    threat = ThreatModel(norm=norm, eps=0.4)
    noise = ImageNoise(0, torch.arange(20))
    x = 0.4 + 0.2 * noise.uniform((2, 9), "x")
    delta = 0.1 * noise.normal((2, 9))
    got = (threat.project(x + delta, x).double() - x.double()).flatten(1).numpy()
    for row, result in zip(((x + delta).double() - x.double()).flatten(1).numpy(), got):
        norm_of_row = np.linalg.norm(row, ORDER[norm])
        if norm_of_row <= 0.4:
            expected = row
        elif norm == "L2":
            expected = row * 0.4 / norm_of_row
        else:
            low, high = 0.0, np.abs(row).max()
            for _ in range(100):
                middle = (low + high) / 2
                inside = np.maximum(np.abs(row) - middle, 0).sum() <= 0.4
                low, high = (low, middle) if inside else (middle, high)
            expected = np.sign(row) * np.maximum(np.abs(row) - high, 0)
        np.testing.assert_allclose(result, expected, atol=3e-6)


def test_a_prepared_projection_equals_a_direct_one():
    for norm in THREAT_NORMS:
        threat = ThreatModel(norm=norm, eps=0.1)
        noise = ImageNoise(0, torch.arange(3))
        x = noise.uniform((4,))
        project = threat.projection(x)
        for draw in range(3):
            far = x + noise.normal((4,), draw)
            assert torch.equal(project(far), threat.project(far, x))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eps", EPS)
def test_bounds_and_projections_hold_on_a_gpu(eps):
    noise = ImageNoise(0, torch.arange(50))
    x = torch.cat([noise.uniform((30,)), torch.tensor([0.0, 1.0, 1e-45, 1e-30]).expand(50, 4)], 1)
    for norm in THREAT_NORMS:
        threat = ThreatModel(norm=norm, eps=eps)
        if norm == "Linf":
            assert all(torch.equal(a.cpu(), b) for a, b in zip(threat.bounds(x.cuda()), threat.bounds(x)))
        projected = threat.project((x + noise.normal((34,))).cuda(), x.cuda())
        assert torch.linalg.vector_norm(projected - x.cuda(), ORDER[norm], dim=1).max().item() <= threat.eps
        assert_inside(threat, projected.cpu(), x)


def test_only_linf_has_bounds():
    with raises_problem("not_supported", "norm"):
        ThreatModel(norm="L2", eps=1).bounds(torch.zeros(1, 2))


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_distance_is_that_of_numpy(norm):
    noise = ImageNoise(0, torch.arange(5))
    x, z = noise.uniform((3, 4), 0), noise.uniform((3, 4), 1)
    expected = [np.linalg.norm(d.ravel(), ORDER[norm]) for d in (z.double() - x.double()).numpy()]
    np.testing.assert_allclose(ThreatModel(norm=norm, eps=1.0).distance(z, x).numpy(), expected, rtol=1e-14)


# -- start and step ----------------------------------------------------------------------------------------------------


@quick
@given(x=images, norm=st.sampled_from(THREAT_NORMS), eps=st.sampled_from(EPS), seed=st.integers(0, 100))
def test_random_start_lies_inside(x, norm, eps, seed):
    threat = ThreatModel(norm=norm, eps=eps)
    x = tensor(x)
    assert_inside(threat, threat.random_start(x, ImageNoise(seed, torch.arange(len(x)))), x)


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_random_start_is_uniform_in_the_ball(norm):
    """The share of the radius, to the power of the dimension, is uniform; so is each sign."""
    d, threat = 3, ThreatModel(norm=norm, eps=0.25)
    x = torch.full((20_000, d), 0.5)
    start = threat.random_start(x, ImageNoise(0, torch.arange(len(x))))
    delta = (start.double() - 0.5).numpy()
    share = (np.linalg.norm(delta, ORDER[norm], axis=1) / 0.25) ** d
    assert stats.kstest(share, "uniform").pvalue > 1e-3
    octants = np.bincount((delta > 0) @ [1, 2, 4], minlength=8)
    assert stats.chisquare(octants).pvalue > 1e-3
    order = np.bincount(np.abs(delta).argmax(1), minlength=d)
    assert stats.chisquare(order).pvalue > 1e-3
    if norm == "Linf":
        assert stats.kstest((delta.ravel() + 0.25) / 0.5, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("norm", ["Linf", "L2"])
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_steepest_has_length_one_and_ascends_fastest(norm, scale):
    grad = scale * ImageNoise(0, torch.arange(5)).normal((3, 4, 4))
    step = ThreatModel(norm=norm, eps=0.1).steepest(grad).double().flatten(1)
    rows = grad.double().flatten(1)
    torch.testing.assert_close(step.norm(ORDER[norm], dim=1), torch.ones(5).double(), rtol=1e-6, atol=0)
    dual = {"Linf": 1, "L2": 2}[norm]
    torch.testing.assert_close((step * rows).sum(1), rows.norm(dual, dim=1), rtol=1e-6, atol=0)


def test_the_l1_step_goes_to_the_largest_gradients():
    grad = ImageNoise(0, torch.arange(5)).normal((100,))
    step = ThreatModel(norm="L1", eps=1.0).steepest(grad)
    torch.testing.assert_close(step.abs().sum(1), torch.ones(5))
    assert ((step != 0).sum(1) == 5).all()
    assert (grad.abs()[step != 0].view(5, 5).amin(1) >= grad.abs()[step == 0].view(5, 95).amax(1)).all()
    assert torch.equal(step.sign()[step != 0], grad.sign()[step != 0])


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_no_gradient_no_step(norm):
    step = ThreatModel(norm=norm, eps=0.1).steepest(torch.zeros(2, 3, 4))
    assert torch.equal(step, torch.zeros(2, 3, 4))
