"""The plain loops of the benchmark of training, and the engine: the same training, computed in two ways."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from advnorm.attacks import PGD
from advnorm.bench.plain_loops import HYBRID, PlainLoop, has_plain_loop
from advnorm.bench.training_modes import TrainMode, build_training, load_images, with_enough_images
from advnorm.config import Config, Named
from advnorm.training.journal import Journal
from advnorm.training.loop import TrainingLoop
from advnorm.training.ranks import Ranks
from advnorm.training.run_folder import Run
from support.plain_loop_ranks import train_rank

CPU = Ranks(device=torch.device("cpu"))
#: Without random starts and augmentation, and with one norm for both domains, every loop computes the same numbers.
SAME = replace(
    HYBRID,
    model=Named("small_cnn"),
    norm="bn",
    augment="none",
    attack=replace(HYBRID.attack, steps=2, start="clean"),
    batch_size=8,
    data=Named("synthetic", size=64),
)


def engine(config: Config, *, compiled: bool = False) -> TrainingLoop:
    """The training of ``advnorm train``, ready for steps."""
    journal = Journal(Path("bench"), active=False)
    config = replace(config, compile=compiled)
    loop = TrainingLoop(Run(Path("bench")), config, load_images(config, None), CPU, journal, workers=None)
    loop.prepare(0)
    return loop


def engine_losses(config: Config, batches: list, *, compiled: bool = False) -> tuple[list[float], nn.Module]:
    loop = engine(config, compiled=compiled)
    losses = []
    with loop.program.scope():
        for number, (x, y) in enumerate(batches):
            output = loop.program(x, y, torch.arange(len(x)) + number)
            loop.optimizer.param_groups[0]["lr"] = config.lr
            loop.optimizer.step()
            losses.append(output.loss.item())
    return losses, loop.model


def plain_losses(config: Config, batches: list, **kind: bool) -> tuple[list[float], PlainLoop]:
    notes = []
    plain = PlainLoop(config, load_images(config, None), CPU, notes.append, **kind)
    plain.model.load_state_dict(engine(config).model.state_dict())
    with plain.scope():
        losses = [plain.step(x, y).item() for x, y in batches]
    assert notes == []
    return losses, plain


def batches(config: Config, count: int = 3) -> list:
    data = load_images(config, None)
    x, y = data.images.float() / 255, data.labels
    return [(x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]) for i in range(count)]


@pytest.mark.parametrize("careful", [False, True])
def test_the_plain_loops_train_like_the_eager_steps(careful):
    expected, model = engine_losses(SAME, batches(SAME))
    losses, plain = plain_losses(SAME, batches(SAME), careful=careful)
    assert losses == pytest.approx(expected, rel=1e-5)
    found = plain.model.state_dict()
    for name, value in model.state_dict().items():  # after three steps: weights, and running statistics
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_the_careful_loop_in_bf16_stays_within_a_percent_of_float32():
    expected, _ = engine_losses(SAME, batches(SAME, 1))
    half = replace(SAME, precision="bf16", channels_last=True)
    losses, plain = plain_losses(half, batches(SAME, 1), careful=True)
    assert losses == pytest.approx(expected, rel=0.01) and losses != expected
    assert plain.model.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert plain.forward(plain.model, batches(SAME, 1)[0][0]).dtype == torch.float32
    assert plain.model.conv2.weight.dtype == torch.float32


@pytest.mark.slow
def test_compiled_loops_train_like_the_eager_steps():
    expected, _ = engine_losses(SAME, batches(SAME))
    losses, _ = plain_losses(SAME, batches(SAME), careful=True, compiled=True)
    ours, _ = engine_losses(SAME, batches(SAME), compiled=True)
    assert losses == pytest.approx(expected, rel=1e-4) and ours == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
@pytest.mark.world_size(2)
def test_processes_train_the_same_weights_with_their_own_images(tmp_path):
    torch.multiprocessing.spawn(train_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert len(first["images"]) == 2 * 4 and not torch.equal(first["images"], second["images"])
    assert not torch.equal(first["weights"]["conv2.weight"], first["before"])
    for name, value in first["weights"].items():
        torch.testing.assert_close(second["weights"][name], value, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["careful_compiled", "compiled"])
def test_every_compiled_mode_runs_without_a_fallback(mode: TrainMode):
    notes = []
    build_training(mode, SAME, load_images(SAME, None), CPU, notes.append)(2)
    assert notes == []


@pytest.mark.parametrize("careful", [False, True])
def test_a_plain_attack_is_projected_gradient_descent(careful):
    config = replace(SAME, norm_options={}, attack=replace(SAME.attack, steps=3))
    plain = PlainLoop(config, load_images(config, None), CPU, print, careful=careful)
    [(x, y)] = batches(config, 1)
    expected = PGD(threat=plain.pgd.threat, steps=3, step_size="2/255", start="clean")(plain.model, x, y)
    torch.testing.assert_close(plain.attack(x, y), expected, rtol=0, atol=1e-6)
    started = PlainLoop(
        replace(config, attack=replace(config.attack, start="uniform")), load_images(config, None), CPU, print
    )
    x_adv = started.attack(x, y)
    assert (x_adv - x).abs().max() <= plain.pgd.threat.eps + 1e-6 and x_adv.min() >= 0 and x_adv.max() <= 1


def test_the_attack_of_the_careful_loop_computes_no_gradient_of_a_weight():
    seen = []
    plain = PlainLoop(SAME, load_images(SAME, None), CPU, print, careful=True)
    fixed = plain.model.fc.bias.requires_grad_(False)  # a parameter that is not trained stays so
    plain.trained = [parameter for parameter in plain.trained if parameter is not fixed]
    plain.attacked = lambda x: seen.append([p.requires_grad for p in plain.model.parameters()]) or plain.model(x)
    plain.run(1)
    assert len(seen) == 2 and not any(map(any, seen))
    assert [p.requires_grad for p in plain.model.parameters()] == [p is not fixed for p in plain.model.parameters()]
    assert plain.model.training


def test_the_plain_loop_updates_its_statistics_once_per_step():
    plain = PlainLoop(SAME, load_images(SAME, None), CPU, print)
    plain.run(3)
    norms = [module for module in plain.model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert norms and all(norm.num_batches_tracked == 3 for norm in norms)


@pytest.mark.parametrize(
    ("override", "has"),
    [
        ("norm=dual_affine_gn", True),
        ("model.width=0.5", True),
        ("data.image_size=64", True),
        ("attack.steps=3", True),
        ("attack.start=clean", True),
        ("lr=1", True),
        ("precision=bf16", True),
        ("attack.start=gaussian", False),
        ("attack.restarts=2", False),
        ("objective=trades", False),
        ("objective.clean_weight=0.3", False),
        ("second_pass=sam", False),
        ("attack={name: fgsm}", False),
        ("optimizer=adam", False),
        ("ema=0.99", False),
        ("dual_head=true", False),
    ],
)
def test_a_configuration_has_a_plain_loop_if_the_loop_trains_the_same(override, has):
    overrides = [override, "nesterov=false"] if "adam" in override else [override]
    assert has_plain_loop(HYBRID.with_overrides(overrides)) == has


def test_a_plain_loop_trains_the_own_norms_of_a_network():
    config = replace(SAME, norm="dual_affine_gn", model=Named("resnet20", width=0.5))
    plain = PlainLoop(config, load_images(config, None), CPU, print)
    assert {type(module) for module in plain.model.modules() if "Norm" in type(module).__name__} >= {nn.BatchNorm2d}
    assert plain.model.conv1.out_channels == 8


def test_synthetic_images_give_several_batches_and_large_ones_do_not_fill_the_memory():
    def count(**sizes: int) -> int:
        batch = sizes.pop("batch", 16)
        return with_enough_images(replace(HYBRID, batch_size=batch, data=Named("synthetic", **sizes))).data.options[
            "size"
        ]

    assert count() == 2048 and count(batch=1024) == 4096 and count(image_size=224, batch=64) == 256
    assert count(size=10) == 10
