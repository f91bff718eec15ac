"""The promises of the norms on a CUDA device: the kernels are others than on the CPU."""

import copy

import pytest
import torch
import torch._dynamo
from torch import nn

from advnorm.norms import list_norms, make_norm, route, statistics
from support.norm_oracles import along, build, parts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NAMES = list_norms()


@pytest.fixture(autouse=True)
def _exact():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bn", "dual_bn", "dual_affine_bn", "dual_stats_bn", "triple_bn"])
def test_one_domain_equals_the_builtin_norm_bit_for_bit(name, dtype, channels_last):
    torch.manual_seed(0)
    norm, builtin = make_norm(name, 16, device="cuda"), nn.BatchNorm2d(16, device="cuda")
    for step in range(4):
        training = step < 3
        norm.train(training), builtin.train(training)
        x = torch.randn(12, 16, 8, 8, device="cuda", dtype=dtype)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
        grad = torch.randn_like(x)
        with route(norm, "adv"):
            out = norm(first)
        expected = builtin(second)
        out.backward(grad), expected.backward(grad)
        assert torch.equal(out, expected)
        assert out.stride() == expected.stride()
        assert torch.equal(first.grad, second.grad)
    run = norm.statistics_bank(norm.plan.feeds[1])
    assert all(torch.equal(a, b) for a, b in zip(run, builtin.buffers()))


@pytest.mark.parametrize("mode", ["batch", "running"])
@pytest.mark.parametrize("name", NAMES)
def test_a_concatenated_batch_equals_float64_on_the_cpu(name, mode):
    torch.manual_seed(0)
    cpu = build(name, 16).double()
    with torch.no_grad():
        for value in cpu.state_dict().values():
            if value.is_floating_point():
                value.uniform_(0.5, 1.5)
    gpu = copy.deepcopy(cpu).float().cuda()
    counts = {part: 4 + index for index, part in enumerate(parts_of(name))}
    x = torch.randn(sum(counts.values()), 16, 6, 6, dtype=torch.float64) * 2 + 1
    results = []
    for norm, inputs in ((cpu, x), (gpu, x.float().cuda().to(memory_format=torch.channels_last))):
        inputs = inputs.clone().requires_grad_()
        with along(norm, counts), statistics(norm, mode=mode):
            out = norm(inputs)
        out.square().sum().backward()
        results.append([out, inputs.grad, *(p.grad for p in norm.parameters()), *norm.buffers()])
    for expected, got in zip(*results):
        torch.testing.assert_close(got.cpu().double(), expected.double(), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", NAMES)
def test_inductor_equals_eager(name):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), build(name, 16), nn.ReLU()).cuda()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    counts = dict.fromkeys(parts_of(name), 8)
    x = torch.rand(sum(counts.values()), 3, 8, 8, device="cuda")
    for mode in ("batch", "running"):
        outputs = []
        for network, forward in ((model, compiled), (eager, eager)):
            network.zero_grad()
            with along(network, counts), statistics(network, mode=mode):
                out = forward(x)
            out.square().sum().backward()
            outputs.append([out, *(p.grad for p in network.parameters()), *network.buffers()])
        for got, expected in zip(*outputs):
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=5e-3)  # sums over thousands of values
