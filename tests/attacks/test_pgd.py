"""Losses, PGD, FGSM and random noise against oracles written by hand in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from advnorm import attacks
from advnorm._core.precision import float32_as
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import FGSM, PGD, RandomNoise
from advnorm.attacks.losses import LOSSES, cross_entropy, cw_margin, dlr, dlr_targeted, kl_to_clean
from advnorm.attacks.model_access import predicting
from advnorm.attacks.pgd import WorstCase, least_likely, random_target
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.autoattack_models import Watched
from support.problems import raises_problem

LINF = ThreatModel(norm="Linf", eps="8/255")
CLASSES, SHAPE = 6, (2, 4, 4)
SIZE = 32


def numbers(count: int, *shape: int, draw: Any = 0, seed: int = 0) -> Tensor:
    return ImageNoise(seed, torch.arange(count)).normal(shape, draw)


def pictures(count: int = 20) -> tuple[Tensor, Tensor]:
    noise = ImageNoise(0, torch.arange(count)).fold("pictures")
    return (1.2 * noise.uniform(SHAPE, "x") - 0.1).clamp(0, 1), noise.integers(CLASSES, (), "y")


class Net(nn.Module):
    """One hidden layer with a smooth activation; records its inputs."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Parameter(numbers(1, 16, SIZE)[0] / 4)
        self.second = nn.Parameter(scale * numbers(1, CLASSES, 16, draw=1)[0])
        self.calls: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.tanh(x.flatten(1) @ self.first.T) @ self.second.T
        self.calls.append((x.detach().clone(), logits.detach().clone()))
        return logits


def oracle_gradient(net: Net, x: np.ndarray, d_logits) -> tuple[np.ndarray, np.ndarray]:
    """Logits and the gradient of a loss with respect to the images, by hand in float64."""
    first, second = net.first.detach().double().numpy(), net.second.detach().double().numpy()
    hidden = np.tanh(x.reshape(len(x), -1) @ first.T)
    logits = hidden @ second.T
    return logits, ((d_logits(logits) @ second * (1 - hidden**2)) @ first).reshape(x.shape)


def softmax(z: np.ndarray) -> np.ndarray:
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def ce_gradient(y: Tensor):
    return lambda z: softmax(z) - np.eye(CLASSES)[y.numpy()]


def projected(z: np.ndarray, x: np.ndarray, threat: ThreatModel) -> np.ndarray:
    delta = (z - x).reshape(len(x), -1)
    if threat.norm == "Linf":
        delta = delta.clip(-threat.eps, threat.eps)
    else:
        delta = delta * np.minimum(1, threat.eps / np.maximum(np.linalg.norm(delta, axis=1, keepdims=True), 1e-300))
    return (x + delta.reshape(x.shape)).clip(0, 1)


def steepest(gradient: np.ndarray, threat: ThreatModel) -> np.ndarray:
    if threat.norm == "Linf":
        return np.sign(gradient)
    flat = gradient.reshape(len(gradient), -1)
    return (flat / np.linalg.norm(flat, axis=1, keepdims=True)).reshape(gradient.shape)


# -- losses ------------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_papers_in_numpy():
    z, y = 3 * numbers(50, CLASSES), ImageNoise(0, torch.arange(50)).integers(CLASSES)
    t = (y + 2) % CLASSES
    clean = numbers(50, CLASSES, draw=1)
    z64, row, y_, t_ = z.double().numpy(), np.arange(50), y.numpy(), t.numpy()
    ordered = -np.sort(-z64, axis=1)
    others = np.where(np.eye(CLASSES)[y_] == 1, -np.inf, z64).max(1)
    p, q = softmax(clean.double().numpy()), softmax(z64)
    expected = {
        "ce": -np.log(q[row, y_]),
        "cw": others - z64[row, y_],
        "dlr": -(z64[row, y_] - others) / (ordered[:, 0] - ordered[:, 2]),
        "dlr targeted": -(z64[row, y_] - z64[row, t_]) / (ordered[:, 0] - (ordered[:, 2] + ordered[:, 3]) / 2),
        "kl": (p * (np.log(p) - np.log(q))).sum(1),
    }
    got = {
        "ce": cross_entropy(z, y),
        "cw": cw_margin(z, y),
        "dlr": dlr(z, y),
        "dlr targeted": dlr_targeted(z, y, t),
        "kl": kl_to_clean(z, clean.log_softmax(1)),
    }
    for name, value in got.items():
        assert value.dtype == torch.float32 and value.shape == (50,)
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=2e-5, atol=2e-6, err_msg=name)
    assert ((cw_margin(z, y) > 0) == (z.argmax(1) != y)).all()


EXTREME = {
    "equal": torch.zeros(4, CLASSES),
    "saturated": torch.eye(CLASSES)[:4] * 1e4,
    "huge": torch.eye(CLASSES)[:4] * 1e30 - 1e30,
    "three equal at the top": torch.tensor([[5.0, 5.0, 5.0, 5.0, -100.0, 0.0]]).repeat(4, 1),
    "far apart": torch.tensor([[1e5, -1e5, 0.0, 1.0, 2.0, 3.0]]).repeat(4, 1),
}


@pytest.mark.parametrize("kind", EXTREME)
@pytest.mark.parametrize("loss", [*LOSSES, "dlr targeted", "ce targeted", "cw targeted"])
def test_losses_and_gradients_are_finite_for_extreme_logits(loss, kind):
    """Trap 17: no NaN where a probability underflows, no division by zero."""
    y = torch.tensor([0, 1, 4, 5])
    z = EXTREME[kind].clone().requires_grad_()
    if loss == "kl":
        for clean in EXTREME.values():
            value = kl_to_clean(z, clean.log_softmax(1))
            (grad,) = torch.autograd.grad(value.sum(), z)
            assert value.isfinite().all() and grad.isfinite().all()
        return
    name, _, targeted = loss.partition(" ")
    towards = LOSSES[name].targeted
    value = towards(z, y, (y + 1) % CLASSES) if targeted and towards else LOSSES[name].untargeted(z, y)
    (grad,) = torch.autograd.grad(value.sum(), z)
    assert value.isfinite().all() and grad.isfinite().all()


def test_dlr_does_not_change_with_scale_and_shift():
    z, y = numbers(30, CLASSES), ImageNoise(0, torch.arange(30)).integers(CLASSES)
    torch.testing.assert_close(dlr(1000 * z + 7, y), dlr(z, y), rtol=1e-3, atol=1e-4)


def test_dlr_needs_enough_classes():
    with raises_problem("out_of_range", "classes"):
        dlr(torch.zeros(1, 2), torch.tensor([0]))
    with raises_problem("out_of_range", "classes"):
        dlr_targeted(torch.zeros(1, 3), torch.tensor([0]), torch.tensor([1]))


# -- steps -------------------------------------------------------------------------------------------------------------


def oracle_steps(net: Net, attack: PGD, start: np.ndarray, x: Tensor, y: Tensor) -> list[np.ndarray]:
    """The points after each step of one restart from ``start``, in float64."""
    x64, z, velocity, points = x.double().numpy(), start, np.zeros(x.shape), []
    for _ in range(attack.steps):
        _, gradient = oracle_gradient(net, z, ce_gradient(y))
        if attack.momentum:
            flat = np.abs(gradient).reshape(len(x), -1)
            gradient = velocity = attack.momentum * velocity + gradient / flat.sum(1)[:, None, None, None]
        z = projected(z + attack.step * steepest(gradient, attack.threat), x64, attack.threat)
        points.append(z)
    return points


@pytest.mark.parametrize("threat", [LINF, ThreatModel(norm="L2", eps=0.5)], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.75])
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_are_those_of_the_float64_oracle(threat, momentum, steps):
    net = Net()
    x, y = pictures()
    attack = PGD(threat=threat, steps=steps, step_size=threat.eps / 2.3, start="clean", momentum=momentum)
    z = oracle_steps(net, attack, x.double().numpy(), x, y)[-1]
    np.testing.assert_allclose(attack(net, x, y).numpy(), z, atol=5e-5 if threat.norm == "L2" else 3e-7)


@pytest.mark.parametrize("name", ["ce", "cw", "dlr"])
def test_the_first_step_follows_the_loss(name):
    net = Net()
    x, y = pictures()
    clean = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES[name].untargeted(net(clean), y).sum(), clean)
    expected = LINF.project(x + LINF.eps / 4 * gradient.sign(), x)
    got = PGD(threat=LINF, steps=1, step_size=LINF.eps / 4, start="clean", loss=name)(net, x, y)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_fgsm_is_one_full_step_from_the_clean_image(norm):
    threat = ThreatModel(norm=norm, eps=0.1)
    net = Net()
    x, y = pictures()
    attack = FGSM(threat=threat)
    assert attack.step == 0.1
    by_pgd = PGD(threat=threat, steps=1, step_size=0.1, start="clean")(net, x, y)
    assert torch.equal(attack(net, x, y), by_pgd)
    if norm == "Linf":
        _, gradient = oracle_gradient(net, x.double().numpy(), ce_gradient(y))
        expected = (x.double().numpy() + 0.1 * np.sign(gradient)).clip(0, 1)
        np.testing.assert_allclose(by_pgd.numpy(), expected, atol=2e-7)


def test_step_sizes():
    assert PGD(threat=LINF, steps=10).step == pytest.approx(2.5 * LINF.eps / 10, rel=1e-15)  # paper D, B.2
    assert PGD(threat=LINF, step_size="2/255").step == 2 / 255
    assert FGSM(threat=LINF, step_size=0.01).step == 0.01


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_pgd_ascends_and_beats_noise(norm):
    threat = ThreatModel(norm=norm, eps={"Linf": 0.1, "L2": 0.5, "L1": 2.0}[norm])
    net = Net()
    x, y = pictures(100)

    def loss(images: Tensor) -> float:
        return float(cross_entropy(net(images), y).mean().detach())

    noisy = loss(RandomNoise(threat=threat)(net, x, y))
    weak, strong = (loss(PGD(threat=threat, steps=steps)(net, x, y)) for steps in (1, 20))
    assert strong > max(weak, noisy, loss(x)) and weak > noisy
    towards = (y + 1) % CLASSES
    before = cross_entropy(net(x), towards).mean()
    after = cross_entropy(net(PGD(threat=threat)(net, x, y, target=towards)), towards).mean()
    assert after < before


def test_a_step_waits_for_nothing():
    """No value is read back and nothing is selected by mask, so that the loop can be captured as one CUDA graph."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"), name
            return func(*args, **(kwargs or {}))

    net = Net()
    x, y = pictures()
    settings: list[dict[str, Any]] = [
        {},
        {"restarts": 2, "start": 0.2, "target": "random", "keep": "worst"},
        {"loss": "kl", "momentum": 0.9},
        {"loss": "dlr", "target": "least_likely"},
    ]
    for norm in THREAT_NORMS:
        for options in settings:
            attack = PGD(threat=ThreatModel(norm=norm, eps=0.5), steps=3, **options)
            noise = ImageNoise(0, torch.arange(len(x)))
            with predicting(net) as predict, Watch():
                attack.perturb(predict, x, y, noise)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_the_whole_loop_is_one_cuda_graph(norm):
    net = Net().cuda()
    x, y = (v.cuda() for v in pictures())
    index, step = torch.arange(len(x), device="cuda"), torch.tensor(0, device="cuda")
    attack = PGD(threat=ThreatModel(norm=norm, eps=0.1), steps=4, restarts=2, start=0.2, target="random")

    def run() -> Tensor:
        with predicting(net) as predict:
            return attack.perturb(predict, x, y, ImageNoise(0, index).fold(step))

    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    results = []
    for number in (0, 1):  # the noise follows the tag
        step.fill_(number)
        graph.replay()
        torch.testing.assert_close(captured, run(), rtol=0, atol=1e-6)
        results.append(captured.clone())
    assert not torch.equal(*results)


# -- start -------------------------------------------------------------------------------------------------------------


def starts(attack: PGD, x: Tensor, y: Tensor) -> Tensor:
    net = Net()
    attack(net, x, y)
    return net.calls[1 if attack.loss == "kl" or attack.target else 0][0]


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_starts(norm):
    threat = ThreatModel(norm=norm, eps=0.3)
    x, y = pictures(400)
    assert torch.equal(starts(PGD(threat=threat, steps=1, start="clean"), x, y), x)
    uniform = starts(PGD(threat=threat, steps=1), x, y)
    moved = (uniform != x).flatten(1).any(1)
    assert moved.all()
    mixed = starts(PGD(threat=threat, steps=1, start=0.2), x, y)  # paper E
    clean = (mixed == x).flatten(1).all(1)
    assert 0.2 * 400 - 5 * 8 < clean.sum() < 0.2 * 400 + 5 * 8
    assert torch.equal(mixed[~clean], uniform[~clean])
    gaussian = starts(PGD(threat=threat, steps=1, start="gaussian"), x, y)
    inner = (x > 0.01) & (x < 0.99)
    assert float((gaussian - x)[inner].std()) == pytest.approx(0.001, rel=0.05)
    assert torch.equal(starts(PGD(threat=threat, steps=1, start=1.0), x, y), x)
    assert torch.equal(starts(PGD(threat=threat, steps=1, start=0.0), x, y), uniform)


def test_the_seed_decides_the_start():
    x, y = pictures()
    one, same, other = (starts(PGD(threat=LINF, seed=seed), x, y) for seed in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("start", ["uniform", "clean", "gaussian", 0.5])
def test_every_start_lies_in_ball_and_box(norm, start):
    threat = ThreatModel(norm=norm, eps=0.0005)  # smaller than the deviation of the Gaussian
    x, y = pictures()
    found = starts(PGD(threat=threat, start=start), x, y)
    assert (threat.distance(found, x) <= threat.eps).all()
    assert ((found >= 0) & (found <= 1)).all()


# -- restarts ----------------------------------------------------------------------------------------------------------


def test_every_restart_begins_without_momentum():
    net = Net()
    x, y = pictures()
    attack = PGD(threat=LINF, steps=3, restarts=3, momentum=0.9)
    attack(net, x, y)
    points = [images for images, _ in net.calls]
    for restart in range(3):
        first, *later = points[4 * restart : 4 * restart + 4]
        for found, expected in zip(later, oracle_steps(net, attack, first.double().numpy(), x, y), strict=True):
            np.testing.assert_allclose(found.numpy(), expected, atol=3e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("norm", "length"), [("Linf", 1.0), ("L2", 32**0.5), ("L1", 32.0)])
def test_a_point_with_a_nan_output_stays(norm, length, momentum):
    """Such a point fools the model, and its gradient is NaN."""

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            size = x.flatten(1).mean(1)
            return torch.stack([0 * size, 10 * size + (0.55 - size).sqrt()], 1)

    model, x, y = Breaks(), torch.full((3, *SHAPE), 0.5), torch.zeros(3, dtype=torch.long)
    threat = ThreatModel(norm=norm, eps=0.2 * length)
    attack = PGD(threat=threat, steps=8, step_size=0.03 * length, start="clean", momentum=momentum)
    x_adv = attack(model, x, y)
    assert model(x_adv).isnan().any(1).all()


def worst_by_hand(calls: list[tuple[Tensor, Tensor]], y: Tensor, loss) -> Tensor:
    """Per image in plain Python: wrong before right, then the higher loss, then the earlier."""
    chosen = []
    for i in range(len(y)):
        keys = []
        for k, (_, logits) in enumerate(calls):
            wrong = int(logits[i].argmax()) != int(y[i])
            keys.append((wrong, float(loss(logits[i : i + 1], y[i : i + 1])), -k))
        chosen.append(calls[-max(keys)[2]][0][i])
    return torch.stack(chosen)


@pytest.mark.parametrize("name", ["ce", "cw", "dlr"])
@pytest.mark.parametrize("keep", ["last", "worst"])
def test_restarts_keep_the_worst_case_per_image(keep, name):
    """Trap 15. The candidates are what the model was shown: after each restart, or at every step."""
    net = Net(scale=0.5)
    x, y = pictures(40)
    with torch.no_grad():
        y = net(x).argmax(1)  # all right before the attack, so that success matters
    net.calls.clear()
    steps, restarts = 2, 4
    threat = ThreatModel(eps=0.06)
    got = PGD(threat=threat, steps=steps, restarts=restarts, keep=keep, loss=name)(net, x, y)
    assert len(net.calls) == restarts * (steps + 1)
    candidates = net.calls if keep == "worst" else net.calls[steps :: steps + 1]
    assert torch.equal(got, worst_by_hand(candidates, y, LOSSES[name].untargeted))
    fooled = torch.stack([logits.argmax(1) != y for _, logits in candidates])
    assert torch.equal(net(got).argmax(1) != y, fooled.any(0))
    assert 0 < fooled.any(0).sum() < len(y) and not (fooled == fooled[0]).all()


def test_a_wrong_prediction_counts_more_than_a_high_loss():
    y = torch.tensor([0, 0])
    worst = WorstCase(y)
    worst.offer(torch.full((2, 1), 1.0), torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([0.1, 0.1]))
    worst.offer(torch.full((2, 1), 2.0), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([9.0, 9.0]))
    worst.offer(torch.full((2, 1), 3.0), torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([8.0, torch.nan]))
    assert worst.x is not None and worst.x.tolist() == [[1.0], [2.0]]


def test_a_target_reached_counts_more_than_another_wrong_class():
    worst = WorstCase(torch.tensor([0]), target=torch.tensor([2]))
    for value, label, loss in ((1.0, 1, 5.0), (2.0, 2, 0.0), (3.0, 1, 9.0)):
        worst.offer(
            torch.tensor([[value]]), nn.functional.one_hot(torch.tensor([label]), 3).float(), torch.tensor([loss])
        )
    assert worst.x is not None and worst.x.item() == 2.0


def test_more_restarts_fool_at_least_the_same_images():
    net = Net(scale=0.5)
    x, _ = pictures(60)
    y = net(x).argmax(1)
    fooled = [net(PGD(threat=LINF, steps=2, restarts=r)(net, x, y)).argmax(1) != y for r in (1, 2, 5)]
    assert (fooled[0] <= fooled[1]).all() and (fooled[1] <= fooled[2]).all()


# -- targets and the clean output --------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_random_target_is_any_class_but_the_label(classes):
    noise = ImageNoise(0, torch.arange(3000))
    y = noise.integers(classes, (), "y")
    target = random_target(y, classes, noise)
    assert not (target == y).any() and target.min() >= 0 and target.max() < classes
    shift = torch.bincount((target - y) % classes, minlength=classes)[1:].double() / 3000
    assert ((shift - 1 / (classes - 1)).abs() < 0.05).all()


def test_the_least_likely_class_is_never_the_label():
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    assert least_likely(logits, torch.tensor([0, 0])).tolist() == [1, 1]


@pytest.mark.parametrize("name", ["ce", "cw", "dlr"])
def test_targets_by_name_are_those_given_to_the_call(name):
    net = Net()
    x, y = pictures()
    target = least_likely(net(x), y)
    attack = PGD(threat=LINF, steps=3, loss=name)
    by_name = PGD(threat=LINF, steps=3, loss=name, target="least_likely")
    assert torch.equal(by_name(net, x, y), attack(net, x, y, target=target))
    assert not torch.equal(by_name(net, x, y), attack(net, x, y))


def test_the_clean_output_is_computed_once():
    x, y = pictures()
    for options, forwards in (({}, 5), ({"loss": "kl"}, 6), ({"target": "random"}, 6), ({"restarts": 2}, 12)):
        net = Net()
        PGD(threat=LINF, steps=5, **options)(net, x, y)  # type: ignore[arg-type]
        assert len(net.calls) == forwards, options


def test_the_kl_attack_leaves_the_clean_output_and_ignores_the_labels():
    net = Net()
    x, y = pictures()
    attack = PGD(threat=ThreatModel(eps=0.1), loss="kl", start="gaussian")
    x_adv = attack(net, x, y)
    clean = net(x).log_softmax(1)
    start = starts(attack, x, y)
    assert (kl_to_clean(net(x_adv), clean) > kl_to_clean(net(start), clean)).all()
    assert torch.equal(x_adv, attack(net, x, (y + 1) % CLASSES))


@pytest.mark.parametrize(
    ("option", "searched"),
    [("-float32", ("ieee", False)), ("-tf32", ("tf32", False)), ("-bf16", ("ieee", True)), ("", ("tf32", True))],
)
def test_a_search_runs_in_its_precision_else_in_the_callers_and_float32_decides(linf, option, searched):
    (x, y), watched = linf.first(100), Watched(linf.model)
    attack, plain = (attacks.get(f"pgd10{words}", threat=linf.threat) for words in (option, ""))
    with float32_as("tf32", x.device), torch.autocast("cpu", torch.bfloat16):
        images, success = attack.run(watched, x, y)
    _, expected = plain.run(linf.model, x, y)
    assert {entry[1:] for entry in watched.seen if entry[0]} == {searched}
    assert ("ieee", False) in {entry[1:] for entry in watched.seen if not entry[0]}
    with torch.no_grad():
        assert torch.equal(linf.model(images).argmax(1) != y, success)
    assert torch.equal(linf.threat.project(images, x), images)
    assert 0.2 < expected.float().mean() < 1 and (success.float().mean() - expected.float().mean()).abs() <= 0.05


def test_a_model_that_fails_under_autocast_is_searched_without(linf):
    class Filled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(len(x), 10)
            out[torch.ones(len(x), dtype=torch.bool)] = linf.model(x)  # of another type under autocast
            return out

    x, y = linf.first(20)
    fast, plain = (attacks.get(f"pgd5{words}", threat=linf.threat)(Filled(), x, y) for words in ("-bf16", ""))
    assert torch.equal(fast, plain)


def test_labels_are_validated_before_a_search_in_bf16(linf):
    x, y = linf.first(4)
    with raises_problem("out_of_range", "labels"):
        attacks.get("pgd2-bf16", threat=linf.threat)(linf.model, x, y + 10)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pgd20", "pgd20-targeted", "pgd20-restarts2", "pgd20-cw-worst"])
def test_on_a_gpu_a_search_in_bf16_fools_about_as_many_images(linf, name):
    model, (x, y) = copy.deepcopy(linf.model).cuda(), (value.cuda() for value in linf.first(200))
    fast, strict = (attacks.get(f"{name}{words}", threat=linf.threat).run(model, x, y) for words in ("-bf16", ""))
    assert torch.equal(linf.threat.project(fast.images, x), fast.images)
    assert (fast.success.float().mean() - strict.success.float().mean()).abs() <= 0.03


def test_progress_is_reported_at_every_step():
    reported: list[tuple[int, int]] = []
    attack = PGD(threat=LINF, steps=3, restarts=2, progress=lambda done, total: reported.append((done, total)))
    attack(Net(), *pictures())
    assert reported == [(k, 6) for k in range(1, 7)]
    assert "progress" not in repr(attack) and attack == PGD(threat=LINF, steps=3, restarts=2)


@pytest.mark.parametrize(
    ("settings", "code", "field"),
    [
        ({"steps": 0}, "out_of_range", "steps"),
        ({"restarts": 1.5}, "wrong_type", "restarts"),
        ({"step_size": 2}, "out_of_range", "step_size"),
        ({"step_size": "a"}, "wrong_type", "step_size"),
        ({"step_size": 0}, "out_of_range", "step_size"),
        ({"step_size": "0/255"}, "out_of_range", "step_size"),
        ({"start": "unifrom"}, "unknown_name", "start"),
        ({"start": 1.5}, "out_of_range", "start"),
        ({"start": None}, "wrong_type", "start"),
        ({"loss": "cwe"}, "unknown_name", "loss"),
        ({"target": "rand"}, "unknown_name", "target"),
        ({"loss": "kl", "target": "random"}, "conflict", "target"),
        ({"loss": "kl", "start": "clean"}, "conflict", "start"),
        ({"loss": "kl", "start": 0.2}, "conflict", "start"),
        ({"momentum": -1}, "out_of_range", "momentum"),
        ({"momentum": float("nan")}, "wrong_type", "momentum"),
        ({"start": float("inf")}, "wrong_type", "start"),
        ({"step_size": float("nan")}, "wrong_type", "step_size"),
        ({"keep": "best"}, "unknown_name", "keep"),
    ],
)
def test_a_bad_setting_raises(settings, code, field):
    with raises_problem(code, field):
        PGD(threat=LINF, **settings)


def test_all_problems_of_the_settings_are_reported_at_once():
    with raises_problem("out_of_range", "steps") as caught:
        PGD(threat=LINF, steps=0, loss="x")
    assert [problem.field for problem in caught.value.problems] == ["steps", "loss"]


@pytest.mark.parametrize(
    ("target", "code", "field"),
    [
        (lambda y: y, "conflict", "target"),
        (lambda y: y.float(), "wrong_shape", "target"),
        (lambda y: y[:2], "wrong_shape", "target"),
        (lambda y: 3, "wrong_shape", "target"),
        (lambda y: y + CLASSES, "out_of_range", "target"),
        (lambda y: y - CLASSES, "out_of_range", "target"),
    ],
)
def test_a_bad_target_raises(target, code, field):
    x, y = pictures()
    with raises_problem(code, field):
        PGD(threat=LINF)(Net(), x, y, target=target(y))


def test_a_target_and_the_kl_loss_do_not_go_together():
    x, y = pictures()
    with raises_problem("conflict", "target"):
        PGD(threat=LINF, loss="kl")(Net(), x, y, target=(y + 1) % CLASSES)


# -- random noise ------------------------------------------------------------------------------------------------------


def test_linf_noise_has_its_distribution():
    x, y = torch.full((200, *SHAPE), 0.5), torch.zeros(200, dtype=torch.long)
    eps = LINF.eps
    deltas = {k: RandomNoise(threat=LINF, kind=k)(Net(), x, y) - x for k in ("uniform", "gaussian", "binary")}
    assert float(deltas["uniform"].std()) == pytest.approx(eps / 3**0.5, rel=0.02)
    cut = deltas["gaussian"].abs() >= eps * (1 - 1e-5)
    assert float(cut.float().mean()) == pytest.approx(0.0455, abs=0.01)  # beyond two standard deviations
    torch.testing.assert_close(deltas["binary"].abs(), torch.full_like(x, eps), rtol=1e-5, atol=0)
    for delta in deltas.values():
        assert abs(float(delta.mean())) < 5 * eps / delta.numel() ** 0.5


@pytest.mark.parametrize("norm", ["L2", "L1"])
@pytest.mark.parametrize("kind", ["gaussian", "binary"])
def test_other_noise_has_length_eps(norm, kind):
    threat = ThreatModel(norm=norm, eps=0.5)
    x, y = torch.full((20, *SHAPE), 0.5), torch.zeros(20, dtype=torch.long)
    distance = threat.distance(RandomNoise(threat=threat, kind=kind)(Net(), x, y), x)
    torch.testing.assert_close(distance, torch.full_like(distance, 0.5), rtol=1e-4, atol=0)


def test_restarts_of_noise_keep_the_worst():
    net = Net()
    x, y = pictures()
    got = RandomNoise(threat=ThreatModel(eps=0.2), restarts=5)(net, x, y)
    assert len(net.calls) == 5
    assert torch.equal(got, worst_by_hand(net.calls, y, cross_entropy))


def test_noise_needs_no_model_and_kinds_differ():
    net = Net()
    results = [attacks.get(f"noise-{k}", threat=LINF)(net, *pictures()) for k in ("uniform", "gaussian", "binary")]
    assert not net.calls
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_bad_settings_of_noise_raise():
    with raises_problem("unknown_name", "kind") as caught:
        RandomNoise(threat=LINF, kind="gausian", restarts=0)  # type: ignore[arg-type]
    assert {problem.field for problem in caught.value.problems} == {"kind", "restarts"}
