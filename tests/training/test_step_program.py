"""Speed changes nothing but rounding: compiled, on copies and by replays a training is the eager one."""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import advnorm
from advnorm import Config, ThreatModel, benchmark, convert_norm, strip
from advnorm._core.precision import kernels
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import PGD, attacked
from advnorm.attacks.fast_copy import fast_copy
from advnorm.data import digits, load
from advnorm.models.small import SmallCNN
from advnorm.norms import routed_modules
from advnorm.objectives import Hybrid
from advnorm.objectives.base import Images
from advnorm.training.journal import Journal
from advnorm.training.loop import Loop
from advnorm.training.ranks import Ranks
from advnorm.training.run import Run
from advnorm.training.step_program import Replays, _AttackOnCopy, attack_a_copy, shaken

SETTINGS = {
    "model": "small_cnn",
    "data": {"name": "synthetic", "size": 256},
    "norm": "dual_bn",
    "objective": "hybrid",
    "eps": "8/255",
    "attack": {"steps": 3, "step_size": "4/255"},
    "batch_size": 32,
    "lr": 1e-9,  # a step that learned would carry differences of rounding on
    "held_out": 0,
    "validate_every": 0,
}
CASES = {
    "hybrid": {},
    "single": {"norm": "bn"},
    "shared statistics": {"norm": "dual_affine_bn"},
    "shared affine": {"norm": "dual_stats_bn"},
    "heads": {"dual_head": True},
    "sequential": {"objective": {"name": "hybrid", "layout": "sequential"}},
    "half": {"objective": {"name": "hybrid", "clean_share": 0.5}},
    "classical": {"objective": "classical"},
    "trades": {"objective": "trades", "norm": "bn"},
    "trades in branches": {"objective": "trades"},
    "kl": {"objective": "kl", "norm": "bn"},
    "alp": {"objective": "alp", "norm": "bn"},
    "crossed": {"objective": "cross", "norm": "cross_bn"},
    "mixture": {"norm": "gmm_bn"},
    "groups": {"norm": "gn"},
    "standard": {"objective": "standard", "norm": "bn"},
    "shortcuts": {"model": {"name": "resnet20", "width": 0.5}},
    "preact": {"model": {"name": "preact_resnet18", "width": 0.125}},
    "averaged": {"ema": 0.9},
    "clipped": {"grad_clip": 0.1},
}


def loop_of(tmp_path: Path, device: str = "cpu", **settings) -> Loop:
    config = Config.from_dict({**SETTINGS, **settings})
    data = load(config.data.name, "train", **config.data.options)
    journal = Journal(tmp_path, active=True)
    loop = Loop(Run(tmp_path), config, data, Ranks(device=torch.device(device)), journal, workers=0)
    loop.prepare(0)
    return loop


def steps(loop: Loop, count: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    with loop.speed():
        for place, batch in enumerate(loop.loader.epoch(0, 0)):
            if place < count:
                before = loop.sums.get("loss", torch.zeros(())).item()
                loop.train_step(batch)
                losses.append(loop.sums["loss"].item() - before)
    return losses


def statistics_of(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.double().cpu() for name, value in loop.model.named_buffers()}


def adversarial(loop: Loop) -> tuple[torch.Tensor, torch.Tensor]:
    """The first batch attacked, and the images it was."""
    batch = next(iter(loop.loader.epoch(0, 0)))
    with torch.autocast(loop.ranks.device.type, torch.bfloat16, enabled=loop.precision == "bf16"):
        return loop.objective.bare.adversarial(batch.x, batch.y, batch.index), batch.x


def gradients_of(loop: Loop) -> dict[str, torch.Tensor]:
    named = loop.model.named_parameters()
    return {name: value.grad.double().cpu() for name, value in named if value.grad is not None}


def snapshot(loop: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in loop.model.state_dict().items()}


@pytest.mark.parametrize("case", ["hybrid", "single", "shared affine", "heads", "shortcuts", "preact", "trades"])
def test_an_attack_on_the_copy_is_as_strong_and_leaves_the_network_alone(tmp_path, case):
    settings = CASES[case]
    reference, loop = (loop_of(tmp_path, precision=p, lr=0.1, **settings) for p in ("float32", "bf16"))
    steps(reference, 8)
    loop.model.load_state_dict(reference.model.state_dict())
    attack_a_copy(loop.objective, print)
    assert isinstance(loop.objective.adversarial, _AttackOnCopy)
    assert loop.objective.adversarial._copy.folded
    loop.objective.climbed = loop.objective.adversarial._copy  # as it is, not compiled
    before = snapshot(loop)
    found, x = adversarial(loop)
    assert loop.objective.climbed is not None
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in loop.model.parameters())
    assert all(module.state.route is None for module in routed_modules(loop.model).values())
    radius = 8 / 255
    assert (found - x).abs().max() <= radius and found.min() >= 0 and found.max() <= 1
    expected, _ = adversarial(reference)
    losses = [_loss(reference, images) for images in (x, found, expected)]
    assert losses[1] == pytest.approx(losses[2], rel=0.01) and losses[1] > losses[0]


def _loss(loop: Loop, images: torch.Tensor) -> float:
    """What the attack climbs, in float32, through the branch it attacks."""
    batch = next(iter(loop.loader.epoch(0, 0)))
    with attacked(loop.model, route=loop.objective.attacked_branch) as predict, torch.no_grad():
        if loop.config.objective.name == "trades":
            clean, adv = predict(batch.x).log_softmax(1), predict(images).log_softmax(1)
            return torch.nn.functional.kl_div(adv, clean, log_target=True, reduction="batchmean").item()
        return torch.nn.functional.cross_entropy(predict(images), batch.y).item()


@pytest.mark.parametrize("case", ["mixture", "groups", "standard"])
def test_where_a_copy_gains_nothing_there_is_none(tmp_path, case):
    loop = loop_of(tmp_path, precision="bf16", **CASES[case])
    attack_a_copy(loop.objective, print)
    assert not isinstance(loop.objective.adversarial, _AttackOnCopy) and loop.objective.climbed is None


def test_an_attack_on_batch_statistics_has_no_copy(tmp_path):
    loop = loop_of(tmp_path, attack={"steps": 2, "step_size": "4/255", "statistics": "batch_frozen"})
    attack_a_copy(loop.objective, print)
    assert loop.objective.climbed is None


def test_a_copy_that_disagrees_is_not_used_and_that_is_said(tmp_path):
    loop, said = loop_of(tmp_path, precision="bf16"), []
    attack_a_copy(loop.objective, said.append)
    copy = loop.objective.adversarial._copy
    refresh = copy.refresh

    def wrong() -> None:
        refresh()
        copy._parts[-1].bias.add_(3)

    copy.refresh = wrong
    reference = loop_of(tmp_path, precision="bf16")
    assert torch.equal(adversarial(loop)[0], adversarial(reference)[0])
    assert loop.objective.climbed is None and len(said) == 1
    assert said[0].startswith("the attack climbs on the network itself, not on a fast copy: its logits are off by")


def test_a_copy_that_fails_in_whatever_way_is_not_used_and_that_is_said(tmp_path):
    loop, said = loop_of(tmp_path, precision="bf16"), []
    attack_a_copy(loop.objective, said.append)

    def odd(x):
        raise TypeError("an odd model")

    loop.objective.climbed = odd
    expected = adversarial(loop_of(tmp_path, precision="bf16"))[0]
    for _ in range(2):
        assert torch.equal(adversarial(loop)[0], expected)
    assert said == ["the attack climbs on the network itself, not on a fast copy: an odd model"]


@pytest.mark.parametrize("works", [True, False])
def test_a_record_says_whether_the_network_ran_compiled(tmp_path, monkeypatch, works):
    def compiled(eager, **_):
        def run(x):
            if works:
                return eager(x)
            raise torch._dynamo.exc.TorchDynamoException("no compiler")

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    config = Config.from_dict({**SETTINGS, "data": {"name": "synthetic", "size": 32}, "epochs": 1, "compile": True})
    run = advnorm.train(config, out=tmp_path, device="cpu")
    assert run.record["compiled"] is works
    assert ("cannot be compiled" in (run.folder / "log.txt").read_text()) is not works


@pytest.mark.parametrize(("deterministic", "tried"), [(False, True), (False, False), (True, True)])
def test_the_choice_of_kernels_is_left_as_it_was(deterministic, tried):
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    with suppress(KeyError), kernels(deterministic=deterministic, tried=tried):
        assert (cudnn.benchmark, cudnn.deterministic) == (tried and not deterministic, deterministic)
        raise KeyError
    assert (cudnn.benchmark, cudnn.deterministic) == before


class Masked(torch.nn.Module):
    """A network part of which passes no gradient on, which a trace does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.hidden = (torch.nn.Conv2d(3, 8, 3, padding=1) for _ in range(2))
        self.norm, self.head = torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.hidden(x)
        return self.head(self.norm(self.seen(x)).mul(hidden).mean((2, 3)))


class Hooked(torch.nn.Module):
    """A network whose output a hook scales."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)
        self.register_forward_hook(lambda module, args, out: 2 * out)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


BATCH = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8), torch.arange(8)


def hybrid(model: torch.nn.Module) -> Hybrid:
    convert_norm(model, "dual_bn")
    return Hybrid(model, PGD(threat=ThreatModel(eps="8/255"), steps=2))


@pytest.mark.parametrize(
    ("model", "reason"), [(Masked, "its gradients point elsewhere, cosine"), (Hooked, "a Hooked has hooks")]
)
def test_a_network_that_a_copy_would_not_be_is_attacked_itself_and_that_is_said(model, reason):
    torch.manual_seed(0)
    objective, said = hybrid(model()), []
    expected = objective.adversarial(*BATCH)
    attack_a_copy(objective, said.append)
    assert not said  # the folder of the log is there when the training starts
    for _ in range(2):
        assert torch.equal(objective.adversarial(*BATCH), expected)
    assert len(said) == 1 and "on the network itself" in said[0] and reason in said[0]


class Centred(torch.nn.Module):
    """A network with a running mean of its own, which it puts in a new tensor every time."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Linear(8, 10)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        if self.training:
            self.mean = 0.7 * self.mean + 0.3 * x.detach().mean((0, 2, 3))
        return self.head(self.norm(self.conv(x - self.mean[:, None, None])).relu().mean((2, 3)))


REPLACED = "the model has put another tensor in the place of {}; change it in place"


def test_a_copy_is_left_where_the_model_puts_other_tensors_in_place_of_its_own():
    torch.manual_seed(0)
    objective, said = hybrid(Centred()), []
    alone = objective.adversarial
    attack_a_copy(objective, said.append)
    objective.climbed = objective.adversarial._copy  # as it is, not compiled
    objective.adversarial(*BATCH)
    assert objective.climbed is not None and not said
    objective.train()
    objective(*BATCH[:2], index=BATCH[2])
    assert not said
    for _ in range(2):
        objective.adversarial(*BATCH)
    assert objective.climbed is None
    assert said == [f"the attack climbs on the network itself, not on a fast copy: {REPLACED.format('mean')}"]
    assert torch.equal(objective.adversarial(*BATCH), alone(*BATCH))


def test_a_copy_of_the_wrong_bank_is_found_out_before_the_banks_differ(tmp_path):
    loop, said = loop_of(tmp_path), []
    wrong = fast_copy(strip(loop.model, "clean", linked=True).eval())
    objective = loop.objective
    objective.adversarial = _AttackOnCopy(objective, wrong, None, said.append)
    x = next(iter(loop.loader.epoch(0, 0))).x
    with attacked(loop.model, route="adv") as predict, torch.no_grad():
        torch.testing.assert_close(wrong(x), predict(x), rtol=0.05, atol=0.01)  # so far it is right
    adversarial(loop)
    assert objective.climbed is None and "its logits are off by" in said[0]


def test_the_check_of_a_copy_leaves_no_trace(tmp_path):
    loop, said = loop_of(tmp_path, precision="bf16", lr=0.1), []
    steps(loop, 2)
    attack_a_copy(loop.objective, said.append)
    loop.objective.climbed = loop.objective.adversarial._copy  # as it is, not compiled
    before, gradients, state = snapshot(loop), gradients_of(loop), torch.get_rng_state()
    adversarial(loop)
    assert not said
    assert all(torch.equal(before[name], value) for name, value in loop.model.state_dict().items())
    assert all(torch.equal(gradients[name], value) for name, value in gradients_of(loop).items())
    assert torch.equal(torch.get_rng_state(), state)


def test_shaken_tensors_are_others_and_then_the_same_bits_again():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    torch.nn.init.zeros_(model[0].weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with suppress(KeyError), shaken(model):
        for name, value in model.state_dict().items():
            assert value.is_floating_point() == bool((value != before[name]).all()), name
        assert (model[1].running_var > 0).all()
        raise KeyError
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_tensors_without_a_place_for_each_number_are_not_shaken():
    model = torch.nn.BatchNorm2d(2)
    model.register_buffer("memory", torch.empty(0, 8))
    model.register_buffer("scale", torch.ones(1).expand(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with shaken(model):
        assert torch.equal(model.scale, torch.ones(3)) and (model.weight != 1).all()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_what_comes_back_is_captured_and_what_cannot_be_is_told_once():
    said, captures = [], []

    def capture():
        captures.append(len(captures))
        return captures[-1] + 1

    model = torch.nn.BatchNorm2d(1)
    replays = Replays("it", said.append, model)
    assert [replays.of("a", capture) for _ in range(4)] == [None, None, 1, 1]
    assert [replays.of("b", capture) for _ in range(4)] == [None, None, 2, 2]
    assert replays.of("a", capture) is None and len(captures) == 2  # the last one is kept

    def fails():
        raise RuntimeError("no graph\nmore")

    assert [replays.of("c", fails) for _ in range(5)] == [None] * 5
    assert said == ["it cannot be captured as a CUDA graph and runs as it is: no graph"]
    assert not replays.works and replays.of("a", capture) is None

    replays = Replays("it", said.append, model)
    assert [replays.of("a", capture) for _ in range(3)] == [None, None, 3]
    model.running_mean = model.running_mean + 1
    assert [replays.of("a", capture) for _ in range(4)] == [None] * 4
    assert said[1:] == [f"it cannot be captured as a CUDA graph and runs as it is: {REPLACED.format('running_mean')}"]

    def replaces():
        model.running_mean = model.running_mean + 1
        return 7

    before = model.running_mean
    replays = Replays("it", said.append, model)
    assert [replays.of("a", replaces) for _ in range(4)] == [None] * 4
    assert model.running_mean is before and len(said) == 3


# -- on a GPU ----------------------------------------------------------------------------------------------------------

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def stir(loop: Loop, seed: int) -> None:
    """Change every parameter by up to a half, in place: banks differ, and what a copy or a graph keeps is outdated."""
    with torch.no_grad():
        for place, value in enumerate(loop.model.parameters()):
            one = ImageNoise(seed, torch.full((1,), place, device=value.device))
            noise = one.uniform(value.shape)[0] - 0.5
            value.copy_(torch.where(value.any(), value * (1 + noise), 0.2 * noise))


class Trained(NamedTuple):
    """What five steps give, of a training whose parameters are stirred before the first and the fourth."""

    losses: torch.Tensor
    statistics: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]  # of the last step
    alone: dict[str, torch.Tensor]  # gradients of a step more, on images that are given

    @classmethod
    def of(cls, loop: Loop, given: torch.Tensor | None = None) -> tuple[Trained, torch.Tensor | None]:
        """``given``: the adversarial images of the step more, by default its own; they are returned too."""
        batches = list(loop.loader.epoch(0, 0))
        losses = []
        with loop.speed():
            for place, batch in enumerate(batches[:5]):
                if place in (0, 3):
                    stir(loop, place)
                before = loop.sums.get("loss", torch.zeros(())).item()
                loop.train_step(batch)
                losses.append(loop.sums["loss"].item() - before)
            statistics, gradients = statistics_of(loop), gradients_of(loop)
            images = loop.objective.images
            given = images(*batches[5]).x_adv if given is None else given
            same = None if given is None else torch.empty_like(batches[5].x).copy_(given)  # in this training's layout
            loop.objective.images = lambda *batch: Images(*batch, same)
            loop.train_step(batches[5])
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
    assert usual <= 0.1, "a case that says nothing"
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
        assert len(wild) <= len(reference.alone) / 10, "a case that says nothing"
    log = (tmp_path / "log.txt").read_text() if (tmp_path / "log.txt").exists() else ""
    assert "cannot" not in log and "the network itself" not in log, log
    if loop.captured is not None:
        assert loop.captured.replays.replay is not None
    if loop.objective.attack is not None:
        x_adv, x = adversarial(loop)
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
        average, other = (loop.ema.state_dict()["average"][name] for loop in (slow, fast))
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

    alone, step = last("alone"), Loop.train_step

    def dies(loop, batch):
        if loop.step == 11:
            raise KeyError("power")
        return step(loop, batch)

    with monkeypatch.context() as patch, suppress(KeyError):
        patch.setattr(Loop, "train_step", dies)
        last("died")
    found = last("died")
    assert "going on from step 11" in next((tmp_path / "died").iterdir()).joinpath("log.txt").read_text()
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


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=on_gpu) for kind in ("apart", "sam", "apart_sam", "awp")])
def test_second_passes_train_compiled_as_they_do_eagerly(tmp_path, kind):
    settings = {"second_pass": kind, "norm": "bn", "objective": "standard", "lr": 0.02}
    slow = loop_of(tmp_path, "cuda", precision="float32", compile=False, channels_last=False, **settings)
    fast = loop_of(tmp_path, "cuda", precision="float32", compile=True, **settings)
    assert steps(fast, 6) == pytest.approx(steps(slow, 6), rel=1e-3)
    assert fast.captured is not None and fast.captured.replays.replay is not None


@pytest.mark.parametrize("precision", [pytest.param(value, marks=on_gpu) for value in ("float32", "bf16")])
def test_a_replay_draws_what_the_step_itself_would_draw(tmp_path, monkeypatch, precision):
    """Dropout depends on the step alone, so that a resumed training goes on with the same masks."""
    features = SmallCNN.feature_map
    monkeypatch.setattr(SmallCNN, "feature_map", lambda self, x: torch.nn.functional.dropout(features(self, x), 0.5))
    settings = {"objective": "standard", "norm": "bn", "precision": precision, "compile": True}
    whole, resumed = (loop_of(tmp_path, "cuda", **settings) for _ in range(2))
    losses = steps(whole, 6)
    assert whole.captured.replays.replay is not None
    resumed.step = 5
    with resumed.speed():
        resumed.train_step(list(resumed.loader.epoch(0, 0))[5])
    assert resumed.sums["loss"].item() == pytest.approx(losses[5], rel=1e-4)


def test_no_case_is_called_by_a_name_that_config_refuses():
    for settings in CASES.values():
        assert dataclasses.replace(Config.from_dict({**SETTINGS, **settings})) is not None
