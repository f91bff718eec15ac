"""Fused kernels for a concatenated batch equal the papers' formulas in float64.

``TRITON_INTERPRET=1 pytest tests/norms/test_fused.py`` runs the kernels on the CPU, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from advnorm.norms import RoutedNorm, fused, route, statistics
from support.norm_oracles import Oracle, batch, build, changed, parts_of, randomized, snapshot

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NAMES = ["dual_bn", "dual_affine_bn", "dual_stats_bn", "triple_bn", "sandwich_bn"]
FORMATS = {0: torch.contiguous_format, 2: torch.channels_last, 3: torch.channels_last_3d}

#: Relative tolerances: half precision has 8 and 11 bits. The interpreter rounds bfloat16 towards zero.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2**-7 if INTERPRETED else 2**-8, torch.float16: 2**-10}


@pytest.fixture(autouse=True)
def _on_this_device(monkeypatch):
    monkeypatch.setattr(fused, "DEVICE", DEVICE)


def tile(monkeypatch: pytest.MonkeyPatch, **sizes: int) -> None:
    """Choose sizes for which a small batch has many tiles and blocks."""
    from advnorm.norms import fused_kernels

    monkeypatch.setattr(fused_kernels, "TILING", fused_kernels.Tiling(**sizes))


def counts_of(name: str, equal: bool) -> dict[str, int]:
    return {part: 4 if equal else (5, 2, 3)[index] for index, part in enumerate(parts_of(name))}


def place(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """A leaf on the device, in channels-last format."""
    x = x.to(DEVICE, dtype).contiguous(memory_format=FORMATS[x.dim() - 2])
    return x.detach().clone().requires_grad_()


def is_fused(y: Tensor) -> bool:
    return type(y.grad_fn).__name__ == "_NormalizeBackward"


def check(
    name: str, counts: Mapping[str, int], x: Tensor, dtype: torch.dtype = torch.float32, times: int = 1, **options: Any
) -> None:
    """Compare output, gradients and running statistics with the oracle, on the rounded values."""
    norm = randomized(build(name, x.shape[1], **options))
    oracle = Oracle(name, norm)
    norm = norm.to(DEVICE)
    for _ in range(times):
        norm.zero_grad()
        ours = place(x, dtype)
        theirs = ours.detach().cpu().double().requires_grad_()
        with route(norm, counts):
            y = norm(ours)
        assert is_fused(y)
        assert y.dtype == dtype and y.stride() == ours.stride()
        upstream = torch.randn(y.shape, dtype=torch.float64).to(dtype)
        y.backward(upstream.to(DEVICE))
        expected = oracle.forward(theirs, counts)
        wanted = torch.autograd.grad(expected, [theirs, *oracle.parameters.values()], upstream.double())
    found = [y, ours.grad, *(parameter.grad for parameter in norm.parameters())]
    for index, (a, b) in enumerate(zip(found, [expected, *wanted])):
        tolerances = {"rtol": TOLERANCES[dtype], "atol": 1e-4} if index < 2 else {"rtol": 1e-4, "atol": 1e-3}
        torch.testing.assert_close(a.detach().cpu().double(), b.detach(), **tolerances)
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value.cpu().double(), oracle.buffers[key].double(), rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("equal", [True, False], ids=["equal parts", "unequal parts"])
@pytest.mark.parametrize("name", NAMES)
def test_output_gradients_and_statistics_equal_the_formulas(name, equal, dtype):
    counts = counts_of(name, equal)
    check(name, counts, batch(counts, 24, (5, 3)), dtype)


@pytest.mark.parametrize(("channels", "spatial"), [(64, (7, 5)), (72, (3, 3)), (512, (1, 1)), (1, (9, 1)), (6, (4, 4))])
@pytest.mark.parametrize("name", ["dual_bn", "dual_affine_bn"])
def test_any_number_of_channels_and_positions(name, channels, spatial):
    counts = counts_of(name, equal=False)
    check(name, counts, batch(counts, channels, spatial), torch.bfloat16)


@pytest.mark.parametrize("spatial", [(), (2, 3, 2)])
def test_inputs_without_and_with_three_spatial_dimensions(spatial):
    counts = counts_of("dual_bn", equal=False)
    check("dual_bn", counts, batch(counts, 24, spatial), dim=max(1, len(spatial)))


@pytest.mark.parametrize("options", [{"affine": False}, {"bias": False}], ids=str)
@pytest.mark.parametrize("name", NAMES[:4])
def test_without_weight_or_bias(name, options):
    counts = counts_of(name, equal=False)
    check(name, counts, batch(counts, 24, (3, 3)), **options)


@pytest.mark.parametrize("momentum", [None, 0.3, 1.0])
@pytest.mark.parametrize("name", NAMES[:4])
def test_running_statistics_over_several_batches(name, momentum):
    counts = counts_of(name, equal=False)
    check(name, counts, batch(counts, 24, (3, 3)), momentum=momentum, times=3)


@pytest.mark.parametrize("counts", [{"clean": 9, "adv": 9}, {"clean": 1, "adv": 17}, {"clean": 12, "adv": 6}], ids=str)
@pytest.mark.parametrize("name", ["dual_bn", "dual_affine_bn"])
def test_many_tiles_and_blocks(name, counts, monkeypatch):
    """Blocks of several tiles, the last one shorter; more blocks than one step merges."""
    tile(monkeypatch, elements=256, widest=16, programs=8, warps=4, stages=2, merged=2)
    check(name, counts, batch(counts, 24, (13, 5)))


def test_a_batch_as_large_as_a_training_step():
    counts = {"clean": 40, "adv": 24}
    check("dual_bn", counts, batch(counts, 64, (16, 16)), torch.bfloat16)


@pytest.mark.parametrize("offset", [100.0, -3000.0])
def test_a_mean_far_from_zero(offset):
    counts, x = {"clean": 9, "adv": 5}, batch({"clean": 9, "adv": 5}, 24, (6, 6)) + offset
    norm = randomized(build("dual_bn", 24))
    oracle = Oracle("dual_bn", norm)
    norm, ours = norm.to(DEVICE), place(x)
    with route(norm, counts):
        y = norm(ours)
    expected = oracle.forward(ours.detach().cpu().double(), counts)
    torch.testing.assert_close(y.detach().cpu().double(), expected.detach(), rtol=1e-3, atol=5e-3)
    for key, value in norm.named_buffers():
        torch.testing.assert_close(value.cpu().double(), oracle.buffers[key].double(), rtol=2e-6, atol=1e-4, msg=key)


def test_a_mean_that_changes_within_the_batch(monkeypatch):
    """The first rows of a part are constant and far from the others."""
    tile(monkeypatch, elements=256, widest=16, programs=8, warps=4, stages=2, merged=2)
    counts = {"clean": 9, "adv": 9}
    x = batch(counts, 24, (6, 6))
    x[:2], x[9:11] = 300.0, -200.0
    check("dual_bn", counts, x)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in NAMES), ("dual_bn", {"affine": False}), ("dual_bn", {"bias": False})]
)
def test_second_derivatives(name, options):
    counts = counts_of(name, equal=False)
    norm = randomized(build(name, 24, **options))
    oracle = Oracle(name, norm)
    norm, ours = norm.to(DEVICE), place(batch(counts, 24, (3, 3)))
    theirs = ours.detach().cpu().double().requires_grad_()
    parameters = list(norm.parameters())
    with route(norm, counts):
        y = norm(ours)
    assert is_fused(y)
    expected = oracle.forward(theirs, counts)
    upstream = torch.randn(y.shape, dtype=torch.float64)
    results = []
    sides = [(y, ours, parameters), (expected, theirs, list(oracle.parameters.values()))]
    for output, x, own in sides:
        first = torch.autograd.grad(output.sin(), [x, *own], upstream.to(output), create_graph=True)
        penalty = sum(gradient.square().sum() for gradient in first)
        results.append([*first, *torch.autograd.grad(penalty, [x, *own], allow_unused=True)])
    for a, b in zip(*results):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.detach().cpu().double(), b.detach(), rtol=1e-3, atol=1e-3)


def test_gradients_of_some_inputs_only():
    counts = counts_of("dual_bn", equal=False)
    norm = randomized(build("dual_bn", 24)).to(DEVICE)
    gradients = []
    for frozen in ("nothing", "parameters", "input"):
        norm.zero_grad()
        norm.requires_grad_(frozen != "parameters")
        x = place(batch(counts, 24, (3, 3))).requires_grad_(frozen != "input")
        with route(norm, counts):
            norm(x).square().sum().backward()
        gradients.append([x.grad, *(parameter.grad for parameter in norm.parameters())])
    complete, of_x, of_parameters = gradients
    assert torch.equal(complete[0], of_x[0]) and of_x[1:] == [None] * 4
    assert of_parameters[0] is None and all(map(torch.equal, complete[1:], of_parameters[1:]))


def test_a_gradient_in_another_memory_format():
    counts = counts_of("dual_bn", equal=False)
    norm = randomized(build("dual_bn", 24)).to(DEVICE)
    gradients = []
    for layout in (torch.channels_last, torch.contiguous_format):
        x = place(batch(counts, 24, (3, 3)))
        with route(norm, counts):
            y = norm(x)
        upstream = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(y.shape).contiguous(memory_format=layout)
        y.backward(upstream)
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_equal_inputs_give_equal_bits():
    counts = {"clean": 40, "adv": 24}
    norm = randomized(build("dual_bn", 64)).to(DEVICE)
    x, found = place(batch(counts, 64, (8, 8)), torch.bfloat16), []
    for _ in range(2):
        x.grad = None
        with route(norm, counts), statistics(norm, mode="batch_frozen"):
            y = norm(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert all(map(torch.equal, *found))


def test_frozen_statistics_do_not_change():
    counts = counts_of("dual_bn", equal=False)
    norm = randomized(build("dual_bn", 24)).to(DEVICE)
    x = place(batch(counts, 24, (3, 3)))
    with route(norm, counts):
        with statistics(norm, mode="batch_frozen"):
            before = snapshot(norm)
            frozen = norm(x)
            assert is_fused(frozen) and not changed(norm, before)
        versions = [buffer._version for buffer in norm.buffers()]
        torch.testing.assert_close(norm(x), frozen, rtol=1e-6, atol=1e-6)
    assert len(changed(norm, before)) == 6
    assert all(buffer._version > version for buffer, version in zip(norm.buffers(), versions))


def test_without_running_statistics():
    counts = counts_of("dual_bn", equal=False)
    check("dual_bn", counts, batch(counts, 24, (3, 3)), track_running_stats=False)


def test_gradient_checkpointing_updates_the_statistics_once():
    counts = counts_of("dual_bn", equal=False)
    results = []
    for checkpointed in (False, True):
        norm = randomized(build("dual_bn", 24)).to(DEVICE)
        x = place(batch(counts, 24, (3, 3)))
        with route(norm, counts):
            y = checkpoint(norm, x, use_reentrant=False) if checkpointed else norm(x)
            y.square().sum().backward()
        results.append([x.grad, *norm.buffers(), *(parameter.grad for parameter in norm.parameters())])
    for plain, recomputed in zip(*results):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-5)


def runs_fused(norm: RoutedNorm, x: Tensor, target: Any) -> bool:
    with route(norm, target):
        return is_fused(norm(x))


def test_which_batches_the_kernels_take():
    counts = {"clean": 3, "adv": 2}
    norm = build("dual_bn", 8).to(DEVICE)
    x = torch.randn(5, 8, 4, 4, device=DEVICE).contiguous(memory_format=torch.channels_last)
    assert runs_fused(norm, x, counts)
    assert runs_fused(norm, x.bfloat16(), counts)
    assert not runs_fused(norm, x, "adv"), "one part is normalized by the built-in kernel, bit for bit"
    assert not runs_fused(norm, x.contiguous(), counts), "the channels of a position are not neighbours"
    assert not runs_fused(norm.double(), x.double(), counts)
    norm = norm.float()
    norm.running_var_adv = torch.ones(8, 2, device=DEVICE)[:, 0]
    assert not runs_fused(norm, x, counts), "a kernel reads contiguous statistics"
    many = build("multi_bn", 8, domains=tuple("abcde")).to(DEVICE)
    assert runs_fused(many, x[:4].contiguous(memory_format=torch.channels_last), {"a": 1, "b": 1, "d": 2})
    assert not runs_fused(many, x, dict.fromkeys("abcde", 1)), "more parts than a kernel takes"


def test_forward_mode_and_functorch_use_other_operations():
    counts = {"clean": 3, "adv": 2}
    norm = randomized(build("dual_bn", 8)).to(DEVICE)
    x = place(torch.randn(5, 8, 4, 4)).detach()
    tangent = torch.randn_like(x)

    def loss(x: Tensor) -> Tensor:
        with route(norm, counts), statistics(norm, mode="batch_frozen"):
            return norm(x).sin().sum()

    gradient = torch.autograd.grad(loss(leaf := x.clone().requires_grad_()), leaf)[0]
    torch.testing.assert_close(torch.func.grad(loss)(x), gradient, rtol=1e-4, atol=1e-4)
    _, slope = torch.func.jvp(loss, (x,), (tangent,))
    torch.testing.assert_close(slope, (gradient * tangent).sum(), rtol=1e-3, atol=1e-3)


def test_a_nan_stays_in_its_bank():
    counts = {"clean": 3, "adv": 2}
    norm = randomized(build("dual_bn", 8)).to(DEVICE)
    results = []
    for broken in (False, True):
        norm.zero_grad()
        x = torch.linspace(-2, 2, 640).view(5, 8, 4, 4)
        if broken:
            x[3:] = torch.nan
            with torch.no_grad():
                norm.weight_adv.fill_(torch.nan)
        leaf = place(x)
        with route(norm, counts), statistics(norm, mode="batch_frozen"):
            y = norm(leaf)
        y.square().sum().backward()
        results.append([y[:3], leaf.grad[:3], norm.weight_clean.grad, norm.bias_clean.grad])
    assert all(map(torch.equal, *results))


def test_an_activation_may_change_the_output_in_place():
    counts = {"clean": 3, "adv": 2}
    norm = randomized(build("dual_bn", 8)).to(DEVICE)
    gradients = []
    for inplace in (False, True):
        x = place(torch.linspace(-2, 2, 640).view(5, 8, 4, 4))
        with route(norm, counts):
            nn.functional.silu(norm(x), inplace=inplace).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)
