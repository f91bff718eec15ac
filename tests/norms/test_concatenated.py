"""Equal parts in one piece: the numbers of the built-in norm on each part, and no more memory traffic."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from advnorm.norms import make_norm, route
from advnorm.norms.concatenated import normalize_parts


def reference(x: Tensor, banks: int, weight_PC: Tensor | None, bias_PC: Tensor | None, eps: float) -> Tensor:
    """Normalize each bank, then scale each part, with torch's own functions."""
    z = torch.cat([F.batch_norm(share, None, None, training=True, eps=eps) for share in x.chunk(banks)])
    shape = (1, -1, *(1,) * (x.dim() - 2))
    if weight_PC is not None:
        z = torch.cat([part * weight.view(shape) for part, weight in zip(z.chunk(len(weight_PC)), weight_PC)])
    if bias_PC is not None:
        z = torch.cat([part + bias.view(shape) for part, bias in zip(z.chunk(len(bias_PC)), bias_PC)])
    return z


@pytest.mark.parametrize(("banks", "parts"), [(2, 2), (3, 3), (1, 2), (2, 4), (1, 1)])
@pytest.mark.parametrize("spatial", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("affine", ["both", "weight", "none"])
def test_output_gradients_and_moments_are_those_of_the_built_in_norm(banks, parts, spatial, affine):
    generator = torch.Generator().manual_seed(0)
    x = (5 + 3 * torch.randn(12, 4, *spatial, generator=generator, dtype=torch.float64)).requires_grad_()
    weight, bias = (torch.randn(parts, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(2))
    chosen = (None if affine == "none" else weight), (bias if affine == "both" else None)
    inputs = [value for value in (x, *chosen) if value is not None]
    y, mean, var = normalize_parts(x, banks, parts, *chosen, 1e-3)
    expected = reference(x, banks, *chosen, 1e-3)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad(out, inputs, upstream) for out in (y, expected))
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    dims = [0, *range(2, x.dim())]
    for number, share in enumerate(x.detach().chunk(banks)):
        torch.testing.assert_close(mean[number], share.mean(dims))
        torch.testing.assert_close(var[number], share.var(dims, correction=0))
    assert not mean.requires_grad
    assert not var.requires_grad


def test_the_written_gradient_passes_gradcheck():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(2, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    for banks in (1, 2):
        output = partial(_first_output, banks=banks)
        assert torch.autograd.gradcheck(output, (x, weight, bias))


def _first_output(x: Tensor, weight: Tensor, bias: Tensor, *, banks: int) -> Tensor:
    return normalize_parts(x, banks, 2, weight, bias, 1e-2)[0]


def test_a_compiled_network_may_change_the_output_in_place():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), make_norm("dual_bn", 4), nn.SiLU(inplace=True))
    x = torch.randn(4, 3, 6, 6)
    outcomes = []
    for network in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with route(model, {"clean": 2, "adv": 2}):
            y = network(x)
        y.square().sum().backward()
        outcomes.append([y.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    torch._dynamo.reset()
    for ours, expected in zip(*outcomes):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


class Block(nn.Module):
    """What surrounds a norm in a network: a convolution, an activation and a shortcut."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(32, 32, 3, padding=1, bias=False), norm

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.convolution(x)) + x)


def traffic(norm: nn.Module, counts: dict[str, int] | None, dtype: torch.dtype) -> float:
    """Bytes that a compiled training step of two blocks reads and writes, as the compiler counts them."""
    from torch._inductor import config, metrics
    from torch._inductor.compile_fx import inductor_metrics_log

    model = nn.Sequential(Block(nn.Identity()), Block(norm)).to(memory_format=torch.channels_last)
    x = torch.rand(16, 32, 16, 16).to(memory_format=torch.channels_last).requires_grad_()
    torch._dynamo.reset()
    metrics.reset()
    level = inductor_metrics_log.level
    inductor_metrics_log.setLevel(logging.INFO)
    try:
        with config.patch(fx_graph_cache=False), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            if counts is None:
                y = torch.compile(model)(x)
            else:
                with route(model, counts):
                    y = torch.compile(model)(x)
        y.float().square().sum().backward()
    finally:
        inductor_metrics_log.setLevel(level)
        torch._dynamo.reset()
    return metrics.num_bytes_accessed


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_dual_norm_moves_as_many_bytes_as_the_built_in_norm(dtype):
    plain = traffic(nn.BatchNorm2d(32), None, dtype)
    assert plain > 1e6
    assert traffic(make_norm("dual_bn", 32), {"clean": 8, "adv": 8}, dtype) <= 1.01 * plain
    assert traffic(make_norm("dual_affine_bn", 32), {"clean": 8, "adv": 8}, dtype) <= 1.1 * plain
