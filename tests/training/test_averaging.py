"""The moving average against a float64 oracle, and exact restores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import advnorm
from advnorm.training.averaging import EMA

BUFFERS = ("copy", "average")


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def dual() -> nn.Module:
    return advnorm.create_model("small_cnn", norm="dual_bn", in_channels=1)


def train_step(model: nn.Module, seed: int) -> None:
    """A crude step that moves every parameter and every bank of statistics."""
    generator = torch.Generator().manual_seed(seed)
    model.train()
    with advnorm.route(model, {"clean": 4, "adv": 4}):
        model(torch.rand(8, 1, 12, 12, generator=generator)).square().mean().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.5 * parameter.grad + 0.01)
            parameter.grad = None


def oracle(snapshots: list[torch.Tensor], decay: float) -> torch.Tensor:
    """In float64: average ← d · average + (1 - d) · live, d = min(decay, (1 + t) / (10 + t))."""
    average = snapshots[0].double()
    for t, live in enumerate(snapshots[1:]):
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * live.double()
    return average


@pytest.mark.parametrize("buffers", BUFFERS)
@pytest.mark.parametrize("decay", [0.0, 0.3, 0.99])
def test_the_average_is_the_equation_in_every_bank(decay, buffers):
    model = dual()
    ema = EMA(model, decay, buffers=buffers)
    snapshots = [bits(model)]
    for seed in range(6):
        train_step(model, seed)
        ema.update(model)
        snapshots.append(bits(model))
    parameters = {name for name, _ in model.named_parameters()}
    with ema.swapped(model):
        inside = bits(model)
    assert any("running_mean_adv" in name for name in inside)
    for name, value in inside.items():
        history = [snapshot[name] for snapshot in snapshots]
        if name in parameters or (buffers == "average" and value.is_floating_point()):
            torch.testing.assert_close(value.double(), oracle(history, decay), rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(value, history[-1]), name


def test_the_warm_up_of_the_decay_forgets_the_initialization():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    ema = EMA(model, 0.9999)
    nn.init.constant_(model.weight, 0.0)
    for expected in (1 / 10, 1 / 10 * 2 / 11, 1 / 10 * 2 / 11 * 3 / 12):
        ema.update(model)
        assert ema.average["weight"].item() == pytest.approx(expected, rel=1e-6)
    assert ema.updates == 3


def test_the_live_bits_come_back_whatever_happens_inside():
    model = dual()
    ema = EMA(model, 0.9)
    train_step(model, 0)
    ema.update(model)
    before, addresses = bits(model), {name: value.data_ptr() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="stop"), ema.swapped(model):  # noqa: PT012
        assert not same(bits(model), before)
        train_step(model, 1)  # moves parameters, statistics and their counts
        raise RuntimeError("stop")
    assert same(bits(model), before)
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == addresses
    with ema.swapped(model):
        averaged = bits(model)
    with ema.swapped(model):
        assert same(bits(model), averaged)  # what happened inside has not touched the average


def test_gradients_and_flags_survive_a_swap_and_training_goes_on():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    ema = EMA(model, 0.5)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model[1].weight.grad
    with ema.swapped(model):
        pass
    assert model[1].weight.grad is gradient
    assert [value.requires_grad for value in model.parameters()] == [False, False, True, True]
    model(torch.ones(1, 2)).sum().backward()


def test_a_shared_layer_is_averaged_once():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    ema = EMA(model, 0.5)
    start = shared.weight.detach().clone()
    nn.init.zeros_(shared.weight)
    ema.update(model)
    with ema.swapped(model):
        torch.testing.assert_close(model[2].weight, start / 10)
        assert model[0].weight is model[2].weight
    average = ema.average
    assert list(average) == ["0.weight", "0.bias", "2.weight", "2.bias"]  # a state dict loads into the model
    assert average["0.weight"] is average["2.weight"]


@pytest.mark.parametrize("buffers", BUFFERS)
def test_the_average_loads_into_a_model_over_its_state_dict(buffers):
    model = advnorm.create_model("small_cnn", norm="dual_bn")
    model.register_buffer("constant", torch.ones(1), persistent=False)
    ema = EMA(model, 0.9, buffers=buffers)
    ema.update(model)
    model.load_state_dict(model.state_dict() | ema.average)


def test_short_floats_are_averaged_in_float32():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ema = EMA(model, 0.999)
    ema.updates = 100_000  # past the warm-up
    nn.init.zeros_(model.weight)
    for _ in range(100):
        ema.update(model)
    assert ema.average["weight"].dtype == torch.float32
    with ema.swapped(model):  # in bf16 the average would have stayed at 1
        assert model.weight.dtype == torch.bfloat16
        assert torch.equal(model.weight, torch.full((4, 4), 0.999**100).bfloat16())


def test_a_compiled_model_uses_the_average_without_compiling_again():
    model = nn.Linear(3, 2)
    compiled = torch.compile(model, backend="eager")
    x, count = torch.rand(4, 3), torch._dynamo.utils.counters
    ema = EMA(compiled, 0.5)
    live = compiled(x)
    nn.init.zeros_(model.weight)
    ema.update(compiled)
    frames = count["stats"]["unique_graphs"]
    with ema.swapped(compiled):
        averaged = compiled(x)
    assert count["stats"]["unique_graphs"] == frames
    expected = (live - model.bias) / 10 + model.bias
    torch.testing.assert_close(averaged, expected)


@pytest.mark.parametrize("buffers", BUFFERS)
def test_a_restored_average_continues_bit_for_bit(buffers):
    def run(interrupted: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(3)
        model = dual()
        ema = EMA(model, 0.9, buffers=buffers)
        for seed in range(6):
            train_step(model, seed)
            ema.update(model)
            if interrupted and seed == 2:
                before, ema = ema, EMA(dual(), 0.9, buffers=buffers)
                ema.restore(before.average, before.updates)
        with ema.swapped(model):
            return bits(model)

    assert same(run(True), run(False))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("buffers", BUFFERS)
def test_on_a_gpu_nothing_waits_and_the_average_is_the_same(buffers):
    model = dual().to("cuda", memory_format=torch.channels_last)
    model.short = nn.Parameter(torch.ones(3, device="cuda", dtype=torch.bfloat16))
    ema, start = EMA(model, 0.9, buffers=buffers), bits(model)
    with torch.no_grad():
        for value in (*model.parameters(), *model.buffers()):
            value.add_(1)
    live = bits(model)
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ema.update(model)
        with ema.swapped(model):
            inside = bits(model)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert same(bits(model), live)
    averaged = ema.average
    for name, value in inside.items():
        expected = 0.1 * start[name].double() + 0.9 * live[name].double() if name in averaged else live[name].double()
        torch.testing.assert_close(value.double(), expected, rtol=1e-2 if name == "short" else 1e-5, atol=1e-6)
