"""FAB: projections onto the linearized boundary, and the smallest perturbation."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog, minimize
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import FAB
from advnorm.attacks.fab import onto_boundary
from advnorm.attacks.model_access import predicting
from advnorm.attacks.victim import VictimModel
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.autoattack_models import overflowing
from support.problems import raises_problem

ORDER = {"Linf": math.inf, "L2": 2, "L1": 1}


def shortest(w: np.ndarray, value: float, low: np.ndarray, high: np.ndarray, norm: str) -> float:
    """The least norm of d with w·d = -value and low <= d <= high, by SciPy; inf where there is none."""
    n = len(w)
    if norm == "Linf":  # minimize t with -t <= d_i <= t
        eye, ones = np.eye(n), np.ones((n, 1))
        bounds_by_t = np.block([[eye, -ones], [-eye, -ones]])
        box = [*zip(low, high), (0, None)]
        equal = np.append(w, 0)[None]
        answer = linprog(np.append(np.zeros(n), 1), bounds_by_t, np.zeros(2 * n), equal, [-value], box)
        return answer.fun if answer.success else math.inf
    if norm == "L1":  # d = p - q
        box = [*zip(np.zeros(n), high), *zip(np.zeros(n), -low)]
        answer = linprog(np.ones(2 * n), A_eq=np.concatenate([w, -w])[None], b_eq=[-value], bounds=box)
        return answer.fun if answer.success else math.inf
    reach = np.where(w * value > 0, low, high)
    if abs(w @ reach) < abs(value):
        return math.inf
    condition = {"type": "eq", "fun": lambda d: w @ d + value, "jac": lambda d: w}
    start = reach * abs(value) / abs(w @ reach)
    answer = minimize(
        lambda d: d @ d, start, jac=lambda d: 2 * d, bounds=[*zip(low, high)], constraints=condition, tol=1e-12
    )
    return math.sqrt(answer.fun)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@given(seed=st.integers(0, 10**6), size=st.floats(0.01, 3))
@settings(max_examples=25, deadline=None, derandomize=True)
def test_the_way_to_the_boundary_is_the_shortest(norm, seed, size):
    noise = ImageNoise(seed, torch.arange(3))
    points = (1.4 * noise.uniform((8,), "x") - 0.2).clamp(0, 1)
    w = noise.normal((8,), "w") * (noise.uniform((8,), "mask") < 0.8)
    value = size * noise.normal((), "value")
    d = onto_boundary(points, w, value, ThreatModel(norm=norm, eps=0.1 if norm == "Linf" else 1.0))
    assert ((points + d >= -1e-6) & (points + d <= 1 + 1e-6)).all()
    for row in range(3):
        x, normal, offset = points[row].double().numpy(), w[row].double().numpy(), value[row].item()
        best = shortest(normal, offset, -x, 1 - x, norm)
        if math.isinf(best):  # as far as the box goes
            reach = np.where(normal * offset > 0, -x, 1 - x)
            assert np.allclose(d[row].numpy(), np.where(normal == 0, 0, reach), atol=1e-5)
            continue
        assert normal @ d[row].double().numpy() == pytest.approx(-offset, abs=1e-4)
        assert torch.linalg.vector_norm(d[row], ORDER[norm]).item() == pytest.approx(best, abs=1e-4, rel=1e-3)


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("targets", [0, 2])
def test_a_linear_model_gives_the_exact_distance(norm, targets):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x = 0.4 + 0.2 * torch.rand(20, 3, 2, 2)
    with torch.no_grad():
        model[1].bias.sub_(model(x).mean(0))  # boundaries in the midst of the images
        logits = model(x)
    y = logits.argmax(1)
    weight = model[1].weight.detach()
    dual = {"Linf": 1, "L2": 2, "L1": math.inf}[norm]
    to_each = torch.stack(
        [(logits[:, k] - logits[range(20), y]).abs() / (weight[k] - weight[y]).norm(dual, dim=1) for k in range(3)], 1
    )
    exact = to_each.scatter(1, y[:, None], torch.inf).amin(1)
    attack = FAB(threat=ThreatModel(norm=norm, eps=1.0), targets=targets, minimal=True, steps=50)
    with predicting(model) as predict:
        found = attack.search(VictimModel(predict), x, y, ImageNoise(0, torch.arange(20)))
    assert found.distance is not None
    inside = exact < 0.3  # where the box does not stand in the way
    assert inside.sum() > 5
    assert (found.distance >= exact * (1 - 1e-4)).all()
    assert torch.allclose(found.distance[inside], exact[inside], rtol=0.01)


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_the_nearest_image_of_a_linear_model_in_the_box_is_misclassified_at_the_exact_distance(norm):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    x = (1.6 * torch.rand(12, 3, 2, 2) - 0.3).clamp(0, 1)  # the box stands in the way of many
    with torch.no_grad():
        model[1].bias.sub_(model(x).mean(0))
        logits, weight = model(x).double().numpy(), model[1].weight.double().numpy()
    y = torch.from_numpy(logits.argmax(1))
    threat = ThreatModel(norm=norm, eps={"Linf": 1.0, "L2": 4.0, "L1": 12.0}[norm])
    attack = attacks.get("fab-t-steps100-targets2-minimal", threat=threat)
    found = attack.run(model, x, y)
    distance = threat.distance(found.images, x)
    for row, label in enumerate(y.tolist()):
        low, high = -x[row].flatten().double().numpy(), 1 - x[row].flatten().double().numpy()
        others = [k for k in range(3) if k != label]
        exact = min(
            shortest(weight[k] - weight[label], logits[row, k] - logits[row, label], low, high, norm) for k in others
        )
        assert found.success[row] == math.isfinite(exact)
        if math.isfinite(exact):
            assert exact * (1 - 1e-4) <= distance[row].item() <= 1.02 * exact + 1e-6


@pytest.mark.parametrize("norm", ["Linf", "L2"])
def test_the_nearest_image_of_a_network_is_not_nearer_than_on_a_dense_grid(norm):
    """Two pixels: all images are known. The distance is attained, and close to the least one."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 3))
    with torch.no_grad():
        model[1].weight.mul_(6)
        side = torch.linspace(0, 1, 401)
        points = torch.cartesian_prod(side, side).view(-1, 1, 1, 2)
        model[3].bias.sub_(model(points).mean(0))
        answers = model(points).argmax(1)
    x = points[torch.randperm(len(points))[:40]]
    y = model(x).argmax(1)
    threat = ThreatModel(norm=norm, eps=1.0 if norm == "Linf" else 1.5)
    found = attacks.get("fab-t-steps40-targets2-minimal", threat=threat).run(model, x, y)
    distance = threat.distance(found.images, x)
    far = torch.linalg.vector_norm((points - x.view(40, 1, 1, 1, 2)).flatten(2), ORDER[norm], dim=2)  # image, point
    least = far.masked_fill(answers == y[:, None], torch.inf).amin(1)
    assert answers.unique().numel() == 3 and found.success.all()
    assert (distance >= least - 1.5 / 400).all()
    assert (distance <= 1.05 * least + 1.5 / 400).double().mean() > 0.8


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_the_smallest_perturbation_is_no_larger_than_the_authors(trained, norm):
    official = pytest.importorskip("pyautoattack.fab_pt")
    t = trained[norm]
    x, y = t.first(120)
    right = t.model(x).argmax(1) == y
    x, y = x[right], y[right]
    theirs = official.FABAttack_PT(t.model, norm=norm, n_iter=40, eps=t.threat.eps, targeted=True, device=x.device)
    theirs.target_class = 2
    with torch.random.fork_rng():
        distance = t.threat.distance(theirs.attack_single_run(x, y, is_targeted=True), x)
    attack = FAB(threat=t.threat, steps=40, targets=1, minimal=True)
    with predicting(t.model) as predict:
        found = attack.search(VictimModel(predict), x, y, ImageNoise(0, torch.arange(len(x))))
    assert found.distance is not None
    ratio = found.distance / distance
    assert ratio.median().item() == pytest.approx(1, abs=0.005)
    assert (ratio <= 1.03).double().mean() > 0.95


class Watched(VictimModel):
    """Records the points of its gradients and of its logits."""

    def __init__(self, predict) -> None:
        super().__init__(predict)
        self.slopes: list[np.ndarray] = []
        self.moves: list[np.ndarray] = []

    def gradient(self, x, value, samples=1):
        self.slopes.append(x.flatten(1).numpy())
        return super().gradient(x, value, samples)

    def jacobian(self, x):
        self.slopes.append(x.flatten(1).numpy())
        return super().jacobian(x)

    def search_logits(self, x):
        self.moves.append(x.flatten(1).numpy())
        return super().search_logits(x)


def tiny() -> tuple[nn.Sequential, Tensor, Tensor]:
    """A smooth network in float64, images of 8 pixels of which some lie on the border of the box, and their classes."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = (1.4 * ImageNoise(0, torch.arange(30)).uniform((1, 2, 4), "x").double() - 0.2).clamp(0, 1)
    return model, x, model(x).argmax(1)


def onto(point: np.ndarray, w: np.ndarray, value: float, norm: str) -> np.ndarray:
    """The shortest d with w·d = -value that stays in the box; where there is none, to the corner."""
    sign = -np.sign(w * value)
    room, weight = np.where(sign > 0, 1 - point, point), abs(w)
    if norm == "L1":
        moved, left = np.zeros_like(w), abs(value)
        for i in np.argsort(-weight):
            moved[i] = min(room[i], left / weight[i])
            left -= weight[i] * moved[i]
        return sign * moved
    pace = weight if norm == "L2" else np.ones_like(w)
    low, high = 0.0, (room / pace).max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if weight @ np.minimum(middle * pace, room) < abs(value) else (low, middle)
    return sign * np.minimum(high * pace, room)


def published(model: nn.Sequential, x: np.ndarray, y: int, target: int | None, norm: str, steps: int):
    """Croce & Hein 2020, algorithm 1 for one image: its points before and after a move, distance, and what happened."""
    inner, bias, outer, offset = (parameter.numpy() for parameter in model.parameters())
    order, dual = ORDER[norm], {"Linf": 1, "L2": 2, "L1": math.inf}[norm]
    others = [target] if target is not None else [c for c in range(len(outer)) if c != y]
    point, distance, before, after, happened = x, math.inf, [], [], Counter[str]()
    for _ in range(steps):
        before.append(point)
        h = np.tanh(inner @ point + bias)
        z, jacobian = outer @ h + offset, outer @ ((1 - h**2)[:, None] * inner)
        s = min(others, key=lambda c: abs(z[c] - z[y]) / np.linalg.norm(jacobian[c] - jacobian[y], dual))
        value, w = z[s] - z[y], jacobian[s] - jacobian[y]
        d, d_image = onto(point, w, value, norm), onto(x, w, value + w @ (x - point), norm)
        length, length_image = np.linalg.norm(d, order), np.linalg.norm(d_image, order)
        alpha = min(length / (length + length_image), 0.1)
        point = ((1 - alpha) * (point + 1.05 * d) + alpha * (x + 1.05 * d_image)).clip(0, 1)
        after.append(point)
        fooled = np.argmax(outer @ np.tanh(inner @ point + bias) + offset) != y
        happened.update(["fooled" if fooled else "not yet", "drawn less" if alpha < 0.1 else "drawn most"])
        if fooled:
            distance = min(distance, np.linalg.norm(point - x, order))
            point = 0.1 * x + 0.9 * point
    return before, after, distance, happened


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("targets", [0, 2])
def test_every_step_is_that_of_the_published_algorithm(norm, targets):
    model, x, y = tiny()
    victim = Watched(model)
    attack = FAB(threat=ThreatModel(norm=norm, eps=0.3), targets=targets, steps=30, minimal=True)
    found = attack.search(victim, x, y, ImageNoise(0, torch.arange(len(x))))
    assert found.distance is not None
    before, after, happened = np.stack(victim.slopes, 1), np.stack(victim.moves, 1), Counter[str]()
    for image in range(len(x)):
        distances = []
        for rank in range(max(1, targets)):
            likely = [c for c in model(x)[image].argsort(descending=True).tolist() if c != y[image]]
            target = likely[rank] if targets else None
            run = published(model, x[image].flatten().numpy(), int(y[image]), target, norm, 30)
            row = image * max(1, targets) + rank
            np.testing.assert_allclose(before[row], run[0], atol=1e-7)
            np.testing.assert_allclose(after[row], run[1], atol=1e-7)
            distances.append(run[2])
            happened += run[3]
        assert found.distance[image].item() == pytest.approx(min(distances), rel=1e-7)
    assert happened.keys() == {"fooled", "not yet", "drawn less", "drawn most"}


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_the_first_restart_begins_at_the_image_and_the_others_apart_at_half_the_way(norm):
    model, x, y = tiny()
    victim, threat = Watched(model), ThreatModel(norm=norm, eps=0.2)
    attack = FAB(threat=threat, targets=2, restarts=3, steps=1, minimal=True)
    attack.search(victim, x, y, ImageNoise(0, torch.arange(len(x))))
    moved = victim.slopes[0].reshape(30, 6, 8) - x.flatten(1).numpy()[:, None]
    assert (moved[:, [0, 3]] == 0).all()
    later = moved[:, [1, 2, 4, 5]].reshape(120, 8)
    assert len(np.unique(later.round(6), axis=0)) == 120
    lengths = np.linalg.norm(later, ORDER[norm], axis=1)
    assert (lengths <= 0.1 * (1 + 1e-6)).all() and lengths.mean() > 0.05  # the box cuts some off


def test_a_success_is_a_point_within_eps(linf):
    x, y = linf.first(150)
    attack = FAB(threat=linf.threat, targets=3, steps=40)
    with predicting(linf.model) as predict:
        noise = ImageNoise(0, torch.arange(150))
        found = attack.search(VictimModel(predict), x, y, noise)
        whole = FAB(threat=linf.threat, targets=3, steps=40, minimal=True).search(VictimModel(predict), x, y, noise)
    assert whole.distance is not None
    wrong = linf.model(x).argmax(1) != y
    assert torch.equal(found.fooled, linf.model(found.x_adv).argmax(1) != y)
    assert torch.equal((found.fooled | wrong), (whole.distance <= linf.threat.eps) | wrong)
    assert (linf.threat.distance(found.x_adv, x) <= linf.threat.eps).all()


def test_restarts_and_all_classes_at_once(linf):
    x, y = linf.first(60)
    robust = [
        (linf.model(attack(linf.model, x, y)).argmax(1) == y).sum().item()
        for attack in (FAB(threat=linf.threat), FAB(threat=linf.threat, targets=0, restarts=2))
    ]
    assert abs(robust[0] - robust[1]) <= 1 and 0 < robust[0] < 60


def test_a_name_creates_the_attack():
    threat = ThreatModel(eps=0.1)
    assert attacks.get("fab-t", threat=threat) == FAB(threat=threat)
    assert attacks.get("fab-steps20", threat=threat) == FAB(threat=threat, targets=0, steps=20)


def test_settings_are_checked_at_once():
    with raises_problem("out_of_range", "steps") as caught:
        FAB(threat=ThreatModel(eps=0.1), steps=0, alpha_max=2, beta=-1)
    assert {problem.field for problem in caught.value.problems} == {"steps", "alpha_max", "beta"}


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("targets", [0, 3])
def test_fab_stays_finite_if_the_surrogate_returns_nan(trained, norm, targets):
    t = trained[norm]
    x, y = t.first(30)
    bright = x.mean((1, 2, 3)).median()
    victim = VictimModel(t.model, search_predict=overflowing(t.model, lambda x: x.mean((1, 2, 3)) > bright))
    found = FAB(threat=t.threat, steps=8, targets=targets).search(victim, x, y, ImageNoise(0, torch.arange(30)))
    assert found.x_adv.isfinite().all()
    assert torch.equal(t.model(found.x_adv).argmax(1) != y, found.fooled) and found.fooled.any()


def test_a_misclassified_image_has_distance_zero(linf):
    x, y = linf.x[:12], linf.y[:12].clone()
    y[:5] = (linf.model(x).argmax(1)[:5] + 1) % 10
    attack = FAB(threat=linf.threat, steps=5, targets=2, minimal=True)
    with attacks.predicting(linf.model) as predict:
        wrong = predict(x).argmax(1) != y
        found = attack.search(VictimModel(predict), x, y, attack.noise(torch.arange(12)))
    assert wrong[:5].all() and not wrong.all()
    assert (found.distance == 0).tolist() == wrong.tolist()


def test_the_strict_forward_decides_whether_the_nearest_image_of_a_surrogate_fools_the_model(linf):
    """A surrogate that makes the label lose everywhere, while the model itself classifies every image correctly."""
    x, y = linf.first(10)
    attack = FAB(threat=ThreatModel(eps=0.5), steps=4, targets=2, minimal=True)

    def right(images: Tensor) -> Tensor:
        return nn.functional.one_hot(y[:1].expand(len(images)), 10).float()

    with attacks.predicting(linf.model) as surrogate:
        alone = x[:1], y[:1], attack.noise(torch.arange(1))
        lost = attack.search(VictimModel(surrogate), *alone)
        kept = attack.search(VictimModel(right, search_predict=surrogate), *alone)
    assert lost.fooled.all() and lost.distance is not None and lost.distance.isfinite().all()
    assert not kept.fooled.any() and kept.distance is not None and kept.distance.isinf().all()
