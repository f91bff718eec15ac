"""Replays of the attack and of the training step; on a GPU the fast training is the eager one but for rounding."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from typing import NamedTuple

import pytest
import torch

import advnorm
from advnorm import Config, ThreatModel, benchmark
from advnorm._core.seeding import ImageNoise
from advnorm.data import digits
from advnorm.models.small import SmallCNN
from advnorm.objectives import CraftedBatch
from advnorm.objectives.execution import EAGER, Execution
from advnorm.training.attack_on_copy import copy_branch
from advnorm.training.build import build_model, build_objective
from advnorm.training.cuda_graphs import CapturedStep, Replays
from advnorm.training.loop import TrainingLoop
from advnorm.training.step_program import CapturedProgram, autocast
from support.step_programs import (
    CASES,
    SETTINGS,
    adversarial,
    first_batch,
    gradients_of,
    loop_of,
    snapshot,
    statistics_of,
    steps,
)

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_repeated_key_is_captured_and_a_failure_is_logged_once():
    messages, captures = [], []

    def capture():
        captures.append(len(captures))
        return captures[-1] + 1

    model = torch.nn.BatchNorm2d(1)
    replays = Replays("it", messages.append, model)
    assert [replays.get("a", capture) for _ in range(4)] == [None, None, 1, 1]
    assert [replays.get("b", capture) for _ in range(4)] == [None, None, 2, 2]
    assert replays.get("a", capture) is None and len(captures) == 2  # only the last replay is kept

    def fails():
        raise RuntimeError("no graph\nmore")

    assert [replays.get("c", fails) for _ in range(5)] == [None] * 5
    assert messages == ["it cannot be captured as a CUDA graph and runs without: no graph"]
    assert not replays.works and replays.get("a", capture) is None

    replays = Replays("it", messages.append, model)
    assert [replays.get("a", capture) for _ in range(3)] == [None, None, 3]
    model.running_mean = model.running_mean + 1
    assert [replays.get("a", capture) for _ in range(4)] == [None] * 4
    assert len(messages) == 2 and "the model has assigned a new tensor to running_mean" in messages[1]

    def replaces():
        model.running_mean = model.running_mean + 1
        return 7

    before = model.running_mean
    replays = Replays("it", messages.append, model)
    assert [replays.get("a", replaces) for _ in range(4)] == [None] * 4
    assert model.running_mean is before and len(messages) == 3


GROUPS = {"name": "apart", "groups": 2, "samples": 0.5}
CAPTURED = {
    **{name: case for name, case in CASES.items() if "model" not in case},
    "worst of targeted restarts": {"attack": {"steps": 2, "restarts": 2, "keep": "worst", "target": "random"}},
    "momentum in L2": {"attack": {"steps": 2, "momentum": 0.9, "start": 0.2, "target": "least_likely"}, "threat": "L2"},
    "dlr in L1": {"attack": {"steps": 2, "loss": "dlr"}, "threat": "L1", "eps": 4.0},
    "groups of a second pass": {"second_pass": GROUPS},
    **{kind: {"second_pass": kind} for kind in ("sam", "apart_sam", "awp")},
}


@pytest.mark.parametrize("case", CAPTURED)
def test_attack_and_step_read_no_value_of_a_tensor(monkeypatch, case):
    """A capture fails if an operation waits for the device or gets a tensor of another one. Both raise on ``meta``."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # it does not know this device
    config = Config.from_dict({**SETTINGS, **CAPTURED[case]})
    with torch.device("meta"):
        model = build_model(config, {"image_shape": (3, 8, 8), "num_classes": 10})
        x, y, index = torch.rand(8, 3, 8, 8), torch.zeros(8, dtype=torch.int64), torch.arange(8)
    objective = build_objective(config, model)
    inner = objective.innermost
    x_adv = inner.craft(x, y, index) if inner.needs_attack else None
    copy = copy_branch(inner, pytest.fail) if inner.needs_attack else None
    if copy is not None:
        copy.refresh()
        inner.craft(x, y, index, Execution(surrogate=copy))
    objective.compute_loss(CraftedBatch(x, y, index, x_adv)).loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("change", ["second pass", "statistics"])
def test_a_step_is_captured_again_when_its_operations_change(tmp_path, change):
    loop = loop_of(tmp_path, norm="bn", second_pass="awp", second_pass_warmup_epochs=1, epochs=3, running_epochs=1)
    step, keys = CapturedStep(loop.objective, EAGER, nullcontext, torch.device("cpu"), print), []
    step.replays.get = lambda key, capture: keys.append(key)
    batch = first_batch(loop)
    for epoch in {"second pass": (0, 0, 1), "statistics": (1, 1, 2)}[change]:
        loop.prepare(epoch)
        step(CraftedBatch(batch.x, batch.y, batch.index, batch.x))
    assert keys[0] == keys[1] != keys[2]


def stir(loop: TrainingLoop, seed: int) -> None:
    """Change every parameter by up to a half, in place: banks differ, and what a copy or a graph keeps is outdated."""
    with torch.no_grad():
        for place, value in enumerate(loop.model.parameters()):
            one = ImageNoise(seed, torch.full((1,), place, device=value.device))
            noise = one.uniform(value.shape)[0] - 0.5
            value.copy_(torch.where(value.any(), value * (1 + noise), 0.2 * noise))


def differentiate(loop: TrainingLoop, batch: CraftedBatch) -> None:
    """Compute the gradients of a crafted batch as the program does."""
    if isinstance(loop.program, CapturedProgram):
        loop.program.captured(batch)
        return
    with autocast(loop.config.precision, loop.ranks.device):
        output = loop.objective.compute_loss(batch, loop.program.execution)
    loop.optimizer.zero_grad(set_to_none=True)
    output.loss.backward()


class Trained(NamedTuple):
    """Results of five steps of a training whose parameters are changed before the first and the fourth."""

    losses: torch.Tensor
    statistics: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of the last step
    alone: dict[str, torch.Tensor]  # gradients of a step more, on images that are given

    @classmethod
    def of(cls, loop: TrainingLoop, given: torch.Tensor | None = None) -> tuple[Trained, torch.Tensor | None]:
        """``given``: the adversarial images of the step more, by default its own; they are returned too."""
        batches = list(loop.loader.epoch(0, 0))
        losses = []
        with loop.program.scope():
            for place, batch in enumerate(batches[:5]):
                if place in (0, 3):
                    stir(loop, place)
                before = loop.state.sums.get("loss", torch.zeros(())).item()
                loop.train_step(batch)
                losses.append(loop.state.sums["loss"].item() - before)
            statistics, gradients = statistics_of(loop), gradients_of(loop)
            given = loop.objective.craft_batch(*batches[5], execution=EAGER).x_adv if given is None else given
            same = None if given is None else torch.empty_like(batches[5].x).copy_(given)  # in this training's layout
            differentiate(loop, CraftedBatch(*batches[5], same))
        return cls(torch.tensor(losses).double(), statistics, gradients, gradients_of(loop)), given


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    """The eager training of a case, computed once, and its last adversarial images."""
    known = {}

    def of(case: str, precision: str, *, channels_last: bool) -> tuple[Trained, torch.Tensor | None]:
        key = case, precision, channels_last
        if key not in known:
            settings = {"precision": precision, "compile": False, "channels_last": channels_last, **CASES[case]}
            given = (
                None if precision == "float32" and not channels_last else of(case, "float32", channels_last=False)[1]
            )
            known[key] = Trained.of(loop_of(tmp_path_factory.mktemp("eager"), "cuda", **settings), given)
        return known[key]

    return of


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in CASES])
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-4), ("bf16", 0.01)])
def test_a_fast_training_is_the_eager_one(tmp_path, eager, case, precision, tolerance):
    """Within the gates; where rounding alone takes an eager training farther, within three times as far.

    Networks of a few channels that have not learned carry rounding far, and an attack turns where a gradient is nearly
    0. How far is measured: by the eager training in the same precision and layout. One tensor's rounding is one draw of
    many, so within five times for each. On given images the attack turns nothing, but a ReLU may still turn, which
    alone is half a percent of a small tensor's gradient and little of all gradients together.
    """
    reference, given = eager(case, "float32", channels_last=False)
    rounded, _ = eager(case, precision, channels_last=True)
    loop = loop_of(tmp_path, "cuda", precision=precision, compile=True, **CASES[case])
    fast, _ = Trained.of(loop, given)

    def far(training: Trained, values: str, name: str) -> float:
        return (getattr(training, values)[name] - getattr(reference, values)[name]).norm().item()

    gap, usual = ((one.losses / reference.losses - 1).abs().max().item() for one in (fast, rounded))
    assert usual <= 0.1, "a case that shows nothing"
    assert gap <= max(tolerance, 3 * usual)
    turned = max(30 * tolerance, 0.03)
    for values, bound in (("statistics", 3 * tolerance), ("gradients", turned), ("alone", turned)):
        known = getattr(reference, values)
        assert getattr(fast, values).keys() == known.keys()
        whole, off, usual = (
            sum(value**2 for value in of) ** 0.5
            for of in (
                (value.norm().item() for value in known.values()),
                *((far(training, values, name) for name in known) for training in (fast, rounded)),
            )
        )
        assert off <= max(30 * tolerance * whole, 3 * usual), values
        # A sum that nearly cancels is rounded like its terms.
        terms = 0.02 * sum(value.norm() ** 2 for value in known.values()) ** 0.5 if values != "statistics" else 0.0
        for name, value in known.items():
            allowed = max(bound * (value.norm() + terms) + 1e-5, 5 * far(rounded, values, name))
            assert far(fast, values, name) <= allowed, (values, name)
    if precision == "float32":
        wild = [name for name, value in reference.alone.items() if 5 * far(rounded, "alone", name) > 0.5 * value.norm()]
        assert len(wild) <= len(reference.alone) / 10, "a case that shows nothing"
    log = (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else ""
    assert "cannot" not in log and "the network itself" not in log, log
    if isinstance(loop.program, CapturedProgram):
        assert loop.program.captured.replays.replay is not None
    if loop.objective.attack is not None:
        x_adv, x = adversarial(loop), first_batch(loop).x
        assert (x_adv - x).abs().max() <= 8 / 255 and x_adv.min() >= 0 and x_adv.max() <= 1


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in ("standard", "clipped")])
def test_a_fast_training_moves_as_the_eager_one(tmp_path, case):
    """With a rate at which it learns: parameters, and their average."""
    settings = CASES[case] | {"objective": "standard", "norm": "bn", "lr": 0.05, "ema": 0.9, "precision": "float32"}
    slow = loop_of(tmp_path, "cuda", compile=False, channels_last=False, **settings)
    fast = loop_of(tmp_path, "cuda", compile=True, **settings)
    start = snapshot(slow)
    for loop in (slow, fast):
        steps(loop, 6)
    for name, value in slow.model.named_parameters():
        moved = (value - start[name]).norm()
        assert moved > 0 and (dict(fast.model.named_parameters())[name] - value).norm() <= 0.02 * moved, name
        average, other = (loop.ema.average[name] for loop in (slow, fast))
        assert (average - other).norm() <= 0.02 * (average - start[name]).norm() > 0, name


@pytest.mark.parametrize("case", [pytest.param(case, marks=on_gpu) for case in ("hybrid", "trades")])
def test_a_replayed_attack_leaves_parameters_and_statistics_alone(tmp_path, case):
    loop = loop_of(tmp_path, "cuda", precision="bf16", compile=True, **CASES[case])
    steps(loop, 4)
    before = snapshot(loop)
    for _ in range(3):
        adversarial(loop)
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())


@pytest.mark.parametrize("compiled", [pytest.param(value, marks=on_gpu) for value in (False, True)])
def test_deterministic_kernels_give_the_same_bits_every_time(tmp_path, compiled):
    def final() -> dict[str, torch.Tensor]:
        loop = loop_of(tmp_path, "cuda", deterministic=True, compile=compiled, batch_size=64, lr=0.1)
        steps(loop, 4)
        return snapshot(loop)

    first, second = final(), final()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("compiled", [pytest.param(value, marks=on_gpu) for value in (False, True)])
def test_a_deterministic_run_that_died_ends_with_the_bits_of_one_that_did_not(tmp_path, monkeypatch, compiled):
    config = Config.from_dict({**SETTINGS, "lr": 0.1, "epochs": 2, "deterministic": True, "compile": compiled})

    def last(folder: str) -> dict[str, torch.Tensor]:
        run = advnorm.train(config, out=tmp_path / folder, device="cuda", checkpoint_minutes=0.0)
        return run.model("last").state_dict()

    alone, step = last("alone"), TrainingLoop.train_step

    def dies(loop, batch):
        if loop.state.step == 11:
            raise KeyError("power")
        return step(loop, batch)

    with monkeypatch.context() as patch, suppress(KeyError):
        patch.setattr(TrainingLoop, "train_step", dies)
        last("died")
    found = last("died")
    assert "resuming from step 11" in next((tmp_path / "died").iterdir()).joinpath("log.txt").read_text()
    assert all(torch.equal(found[name], value) for name, value in alone.items())


@pytest.mark.parametrize("norm", [pytest.param(norm, marks=[*on_gpu, pytest.mark.slow]) for norm in ("bn", "dual_bn")])
def test_a_network_that_was_trained_fast_is_as_robust(tmp_path, norm):
    """Over three seeds the mean robust accuracy is that of eager training in float32, within the noise of seeds."""
    settings = {"data": "digits", "norm": norm, "eps": 0.2, "attack": {"steps": 5}, "epochs": 12, "batch_size": 128}
    ways = {"eager": {"compile": False, "precision": "float32"}, "fast": {"compile": True, "precision": "bf16"}}
    found = {}
    for way, changes in ways.items():
        config = Config.from_dict({**settings, **changes, "held_out": 0, "validate_every": 0})
        runs = [advnorm.train(config, seed=seed, out=tmp_path / way, device="cuda") for seed in range(3)]
        results = [
            benchmark(run.model("last", "cuda"), digits("test"), ThreatModel(eps=0.2), ["pgd10"], route="adv")
            for run in runs
        ]
        found[way] = torch.tensor([result.accuracy["adv"]["pgd10"] for result in results], dtype=torch.float64)
    noise = found["eager"].std() * (2 / 3) ** 0.5  # of a difference of two means
    assert abs(found["fast"].mean() - found["eager"].mean()) <= 3 * noise + 0.01, found
    assert found["fast"].min() > found["eager"].min() - 0.1 > 0.2, found  # of ten digits


@pytest.mark.parametrize("kind", [pytest.param(k, marks=on_gpu) for k in ("apart", GROUPS, "sam", "apart_sam", "awp")])
def test_second_passes_train_compiled_as_they_do_eagerly(tmp_path, kind):
    settings = {"second_pass": kind, "norm": "bn", "objective": "standard", "lr": 0.02}
    slow = loop_of(tmp_path, "cuda", precision="float32", compile=False, channels_last=False, **settings)
    fast = loop_of(tmp_path, "cuda", precision="float32", compile=True, **settings)
    assert steps(fast, 6) == pytest.approx(steps(slow, 6), rel=1e-3)
    assert isinstance(fast.program, CapturedProgram) and fast.program.captured.replays.replay is not None


@pytest.mark.parametrize("kind", [pytest.param("awp", marks=on_gpu)])
def test_a_second_pass_that_starts_later_is_captured_as_it_runs_eagerly(tmp_path, kind):
    settings = {"second_pass": kind, "second_pass_warmup_epochs": 1, "epochs": 2, "norm": "bn", "objective": "standard"}
    slow = loop_of(tmp_path, "cuda", precision="float32", compile=False, channels_last=False, lr=0.02, **settings)
    fast = loop_of(tmp_path, "cuda", precision="float32", compile=True, lr=0.02, **settings)
    for epoch in (0, 1):
        slow.prepare(epoch)
        fast.prepare(epoch)
        assert steps(fast, 6) == pytest.approx(steps(slow, 6), rel=1e-3)
    assert isinstance(fast.program, CapturedProgram) and fast.program.captured.replays.replay is not None


@pytest.mark.parametrize("precision", [pytest.param(value, marks=on_gpu) for value in ("float32", "bf16")])
def test_a_replay_draws_what_the_step_itself_would_draw(tmp_path, monkeypatch, precision):
    """Dropout depends on the step alone, so that a resumed training draws the same masks."""
    features = SmallCNN.feature_map
    monkeypatch.setattr(SmallCNN, "feature_map", lambda self, x: torch.nn.functional.dropout(features(self, x), 0.5))
    settings = {"objective": "standard", "norm": "bn", "precision": precision, "compile": True}
    whole, resumed = (loop_of(tmp_path, "cuda", **settings) for _ in range(2))
    losses = steps(whole, 6)
    assert isinstance(whole.program, CapturedProgram) and whole.program.captured.replays.replay is not None
    resumed.state.step = 5
    with resumed.program.scope():
        resumed.train_step(list(resumed.loader.epoch(0, 0))[5])
    assert resumed.state.sums["loss"].item() == pytest.approx(losses[5], rel=1e-4)
