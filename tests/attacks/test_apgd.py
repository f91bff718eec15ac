"""Auto-PGD, and what the searches of AutoAttack share."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import APGD, PGD
from advnorm.attacks.apgd import _ascend, _Dense, _Rows, _Sparse
from advnorm.attacks.losses import cross_entropy, label_margin
from advnorm.attacks.model_access import predicting
from advnorm.attacks.search import CandidateGrid
from advnorm.attacks.victim import VictimModel
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.problems import raises_problem


def noise_for(x: Tensor, seed: int = 0) -> ImageNoise:
    return ImageNoise(seed, torch.arange(len(x)))


class Double(nn.Module):
    """Computes in float64, so that a batch's size and order leave no trace in the float32 logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.double())


# -- the algorithm -----------------------------------------------------------------------------------------------------


def test_checkpoints_are_those_of_the_paper():
    assert sorted(_Dense(ThreatModel(eps=0.1), 100, 0.75).checkpoints) == [22, 41, 57, 70, 80, 87, 93, 99]


@pytest.mark.parametrize("norm", THREAT_NORMS)
@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_the_point_kept_has_the_highest_value_seen(trained, norm, loss):
    x, y = trained[norm].first(40)
    seen = []
    with predicting(trained[norm].model) as predict:

        class Spy(VictimModel):
            def gradient(self, x, value, samples=1):
                logits, values, grads = super().gradient(x, value, samples)
                seen.append(label_margin(logits, y[: len(x)]))
                return logits, values, grads

        victim = Spy(predict)
        original, CandidateGrid.DROP = CandidateGrid.DROP, 2.0  # keep all rows, so that they can be identified
        try:
            attack = APGD(threat=trained[norm].threat, steps=20, loss=loss)
            found = attack.search(victim, x, y, noise_for(x))
        finally:
            CandidateGrid.DROP = original
    clean = label_margin(victim.strict_logits(x), y)
    everything = torch.stack([clean, *seen[-21 if norm != "L1" else -9 :]])
    resisted = ~found.fooled
    assert resisted.any() and found.fooled.any()
    assert torch.equal(found.margin[resisted], everything.min(0).values[resisted])


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_more_steps_lower_the_number(trained, norm):
    t = trained[norm]
    x, y = t.first(60)
    robust = []
    for steps in (3, 10, 40):
        x_adv = APGD(threat=t.threat, steps=steps, loss="dlr", targets=9)(t.model, x, y)
        robust.append((t.model(x_adv).argmax(1) == y).sum().item())
    assert robust[0] >= robust[1] >= robust[2] > 0


def test_it_is_no_weaker_than_pgd_with_as_many_steps(linf):
    x, y = linf.first(300)
    pgd, apgd = PGD(threat=linf.threat, steps=100, keep="worst"), APGD(threat=linf.threat)
    robust = [(linf.model(attack(linf.model, x, y)).argmax(1) == y).sum().item() for attack in (pgd, apgd)]
    assert robust[1] <= robust[0] + 1


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize("targets", [0, 9])
def test_few_classes_are_enough(linf, classes, targets):
    few = linf.with_classes(classes)
    attack = APGD(threat=ThreatModel(eps=0.3), loss="dlr", targets=targets, steps=20)
    x_adv = attack(few.model, few.x, few.y)
    before, after = ((few.model(images).argmax(1) == few.y).double().mean() for images in (few.x, x_adv))
    assert before > 0.6 and after < before - 0.3


def test_samples_average_the_gradient_of_a_randomized_model():
    class Noisy(nn.Module):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            flat = x.flatten(1)[:, :3]
            return flat + torch.randn_like(flat)

    x, y = torch.full((5, 1, 2, 2), 0.5), torch.zeros(5, dtype=torch.long)
    model = Noisy()
    APGD(threat=ThreatModel(eps=0.1), steps=4, samples=7, restarts=2)(model, x, y)
    assert model.calls >= 7 * 5
    victim = VictimModel(Noisy())
    torch.manual_seed(0)
    one = victim.gradient(x, lambda z, part: z[:, 0] ** 2)[2][:, 0, 0, 0]
    many = victim.gradient(x, lambda z, part: z[:, 0] ** 2, 4000)[2][:, 0, 0, 0]
    assert (one - 1.0).abs().max() > 0.5 and (many - 1.0).abs().max() < 0.15  # d/dx E (x + n)² = 2x


def test_a_gradient_that_is_not_finite_moves_nothing():
    class Sqrt(nn.Module):
        def forward(self, x):
            flat = x.flatten(1)
            return torch.stack([flat[:, 0].sqrt() + 1, flat[:, 1], flat[:, 2]], 1)

    x = torch.tensor([0.0, 0.5, 0.5, 0.5]).view(1, 1, 2, 2).repeat(3, 1, 1, 1)
    x_adv = APGD(threat=ThreatModel(norm="L2", eps=0.2), steps=10)(Sqrt(), x, torch.zeros(3, dtype=torch.long))
    assert x_adv.isfinite().all()


def test_settings_are_checked_at_once():
    with raises_problem("unknown_name", "loss") as caught:
        APGD(threat=ThreatModel(eps=0.1), steps=0, targets=-1, loss="kl", rho=1.5)
    assert {problem.field for problem in caught.value.problems} == {"steps", "targets", "loss", "rho"}


# -- every step, against the papers ------------------------------------------------------------------------------------

#: One image's value and gradient at a point, in float64.
Slope = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Waves(nn.Module):
    """A tiny smooth network in float64 with many local maxima: an ascent overshoots, stalls and returns."""

    def __init__(self, inputs: int, classes: int = 5, hidden: int = 24) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        sizes = ((inputs, hidden), (hidden,), (hidden, classes))
        self.inner, self.phase, self.outer = (torch.randn(s, generator=generator).double() for s in sizes)

    def forward(self, x: Tensor) -> Tensor:
        return (3 * x.flatten(1) @ self.inner + self.phase).sin() @ self.outer

    def images(self, count: int) -> tuple[Tensor, Tensor]:
        """Images in 1/64ths, which float32 holds too, some of them at the border of the box, and their classes."""
        x = ImageNoise(0, torch.arange(count)).uniform((1, 2, len(self.inner) // 2), "x").double()
        x = (64 * (1.4 * x - 0.2).clamp(0, 1)).round() / 64
        return x, self(x).argmax(1)


class Watched(VictimModel):
    """Records the points of its gradients. Nothing fools it, so that no row leaves."""

    def __init__(self, predict) -> None:
        super().__init__(predict)
        self.points: list[np.ndarray] = []

    def gradient(self, x, value, samples=1):
        self.points.append(x.flatten(1).numpy())
        return super().gradient(x, value, samples)

    def misclassifies(self, x, y):
        return torch.zeros_like(y, dtype=torch.bool)


def slope_of(model: nn.Module, loss: str, y: int, target: int) -> Slope:
    """Croce & Hein 2020: the cross-entropy, eq. 6 (``dlr``) or eq. 7 (``dlr-t``) at one image."""

    def slope(point: np.ndarray) -> tuple[float, np.ndarray]:
        x = torch.tensor(point, requires_grad=True)
        z = model(x[None])[0]
        first, second, third, fourth, *_ = z.sort(descending=True).values
        if loss == "ce":
            value = z.logsumexp(0) - z[y]
        elif loss == "dlr":
            value = ((second if z[y] == first else first) - z[y]) / (first - third)
        else:
            value = (z[target] - z[y]) / (first - (third + fourth) / 2)
        return value.item(), torch.autograd.grad(value, x)[0].numpy()

    return slope


@dataclasses.dataclass
class Ascent:
    """What an algorithm of the papers does with one image, up to where it stands still: there rounding decides."""

    slope: Slope
    points: list[np.ndarray] = dataclasses.field(default_factory=list)
    values: list[float] = dataclasses.field(default_factory=list)
    steps: list[float] = dataclasses.field(default_factory=list)  # their sizes after each checkpoint
    reasons: list[str] = dataclasses.field(default_factory=list)  # what decided there

    def begin(self, start: np.ndarray) -> None:
        """Start or restart: the best point is the one with the highest value after this call."""
        self.point = self.previous = self.best = start
        self.value, self.gradient = self.best_value, self.best_gradient = self.slope(start)
        self.points.append(start)
        self.values.append(self.value)

    def move(self, point: np.ndarray) -> bool:
        """Move to a point; return whether its value differs clearly from those before."""
        self.previous, self.point = self.point, point
        before, (self.value, self.gradient) = self.value, self.slope(point)
        self.points.append(point)
        self.values.append(self.value)
        if min(abs(self.value - before), abs(self.value - self.best_value), abs(self.gradient).max()) < 1e-10:
            return False
        if self.value > self.best_value:
            self.best, self.best_value, self.best_gradient = point, self.value, self.gradient
        return True

    def decided(self, reason: str, *, step: float, back: bool) -> None:
        self.reasons.append(reason)
        self.steps.append(step)
        if back:
            self.point, self.gradient = self.best, self.best_gradient


def dense_ascent(slope: Slope, x: np.ndarray, start: np.ndarray, threat: ThreatModel, rho: float) -> Ascent:
    """Croce & Hein 2020, algorithm 1 with 100 steps, Linf and L2.

    Condition 1 with ``<=``, and condition 2 not at the first checkpoint, as in the authors' code.
    """
    radius = threat.eps if threat.norm == "Linf" else threat.inner_radius(x.size)

    def project(point: np.ndarray) -> np.ndarray:
        delta = point - x
        if threat.norm == "Linf":
            return (x + delta.clip(-radius, radius)).clip(0, 1)
        return (x + delta * min(1, radius / np.linalg.norm(delta))).clip(0, 1)

    checkpoints = [0, 22, 41, 57, 70, 80, 87, 93, 99]
    eta, halved = 2 * threat.eps, True
    run = Ascent(slope)
    run.begin(start)
    best_value = run.best_value
    for k in range(1, 101):
        g = run.gradient
        z = project(run.point + eta * (np.sign(g) if threat.norm == "Linf" else g / np.linalg.norm(g)))
        if k > 1:
            z = project(run.point + 0.75 * (z - run.point) + 0.25 * (run.point - run.previous))
        if not run.move(z):
            break
        if k in checkpoints:
            last = checkpoints[checkpoints.index(k) - 1]
            rises = sum(run.values[i + 1] > run.values[i] for i in range(last, k))
            seldom, stuck = rises <= rho * (k - last), not halved and run.best_value == best_value
            reason = "seldom" if rises < rho * (k - last) else "just" if seldom else "stuck" if stuck else "none"
            halved, best_value = seldom or stuck, run.best_value
            eta /= 2 if halved else 1
            run.decided(reason, step=eta, back=halved)
    return run


def sparse_ascent(slope: Slope, x: np.ndarray, start: np.ndarray, eps: float, steps: int) -> Ascent:
    """Croce & Hein 2021: steps whose sparsity adapts, in balls of three radii one after the other."""
    run, early = Ascent(slope), math.ceil(0.3 * steps)
    for factor, count in ((3, early), (2, early), (1, steps - 2 * early)):
        radius = ThreatModel(norm="L1", eps=factor * eps).inner_radius(x.size)

        def project(point: np.ndarray, radius: float = radius) -> tuple[np.ndarray, bool]:
            """The point, and whether it is clear which of its coordinates move."""
            delta = point - x
            room = np.where(delta > 0, 1 - x, x)
            low, high = 0.0, abs(delta).max()
            if np.minimum(abs(delta), room).sum() <= radius:
                high = 0.0
            for _ in range(60):  # the least threshold that brings the rest into the ball
                middle = (low + high) / 2
                outside = np.minimum((abs(delta) - middle).clip(0), room).sum() > radius
                low, high = (middle, high) if outside else (low, middle)
            clear = (abs(abs(delta) - high) > 1e-9) | (delta == 0) | (room == 0)
            return x + np.sign(delta) * np.minimum((abs(delta) - high).clip(0), room), clear.all()

        run.begin(project(run.best if run.points else start)[0])
        eta, moved = factor * eps, np.count_nonzero(run.point != x)
        for k in range(1, count + 1):
            largest = abs(run.gradient) >= np.sort(abs(run.gradient))[-max(1, math.ceil(moved / 1.5))]
            point, clear = project(run.point + eta * np.sign(run.gradient) * largest / largest.sum())
            if not (run.move(point) and clear):
                return run
            if k % max(1, int(0.04 * count)) == 0:
                moves = np.count_nonzero(run.best != x)
                sparser, moved = moves < 0.95 * moved, moves
                eta = factor * eps if sparser else max(eta / 1.5, factor * eps / 10)
                run.decided("sparser" if sparser else "as many", step=eta, back=sparser)
    return run


def watch(attack: APGD, model: Waves, x: Tensor, y: Tensor, rule: type, monkeypatch) -> tuple[np.ndarray, np.ndarray]:
    """The points of each row, and the step sizes after each checkpoint of a rule."""
    sizes, check = [], rule.check

    def checked(self, c, since):
        check(self, c, since)
        sizes.append(c.step.numpy())

    monkeypatch.setattr(rule, "check", checked)
    victim = Watched(model)
    attack.search(victim, x, y, noise_for(x))
    return np.stack(victim.points, 1), np.stack(sizes, 1)


def assert_same_way(points: np.ndarray, sizes: np.ndarray, run: Ascent) -> None:
    """The same points and step sizes, as far as the run of the paper's algorithm tells."""
    np.testing.assert_allclose(sizes[: len(run.steps)], run.steps, rtol=1e-12, err_msg=str(run.reasons))
    np.testing.assert_allclose(points[: len(run.points)], run.points, atol=1e-7)


@pytest.mark.parametrize("rho", [0.75, 0.5])
@pytest.mark.parametrize(
    ("norm", "eps", "loss", "targets"), [("Linf", 1 / 8, "ce", 0), ("Linf", 1 / 8, "dlr", 2), ("L2", 0.25, "ce", 0)]
)
def test_every_step_is_that_of_the_published_algorithm(norm, eps, loss, targets, rho, monkeypatch):
    model, threat = Waves(8), ThreatModel(norm=norm, eps=eps)
    x, y = model.images(24)
    attack = APGD(threat=threat, loss=loss, targets=targets, rho=rho)
    points, sizes = watch(attack, model, x, y, _Dense, monkeypatch)
    reasons: Counter[str] = Counter()
    for row in range(len(points)):
        image, rank = divmod(row, max(1, targets))
        others = [c for c in model(x)[image].argsort(descending=True).tolist() if c != y[image]]
        slope = slope_of(model, loss + "-t" * bool(targets), int(y[image]), others[rank])
        run = dense_ascent(slope, x[image].flatten().numpy(), points[row, 0], threat, rho)
        assert_same_way(points[row], sizes[row], run)
        reasons.update(run.reasons)
    if rho < 0.75:  # where each condition decided somewhere, and the border case of the first one too
        assert reasons.keys() == {"none", "seldom", "just", "stuck"}


def test_every_sparse_step_is_that_of_the_published_algorithm(monkeypatch):
    model, eps = Waves(24), 0.5
    x, y = model.images(12)
    points, sizes = watch(APGD(threat=ThreatModel(norm="L1", eps=eps), steps=170), model, x, y, _Sparse, monkeypatch)
    reasons, far = Counter[str](), 0
    for row in range(len(points)):
        slope = slope_of(model, "ce", int(y[row]), 0)
        run = sparse_ascent(slope, x[row].flatten().numpy(), points[row, 0], eps, 170)
        assert_same_way(points[row], sizes[row], run)
        reasons.update(run.reasons)
        far += len(run.points) > 110
    assert reasons.keys() == {"sparser", "as many"} and far >= 3  # the last ball is that of the steps 105 to 173


@pytest.mark.parametrize("steps", [37, 100])
def test_the_best_value_is_that_of_the_authors_from_the_same_start(steps):
    official = pytest.importorskip("pyautoattack.autopgd_base").APGDAttack
    model = Waves(8)
    x, y = model.images(60)
    victim = Watched(model)
    APGD(threat=ThreatModel(eps=1 / 8), steps=steps).search(victim, x, y, noise_for(x))
    points = torch.tensor(np.stack(victim.points)).view(steps + 1, *x.shape)
    values = torch.stack([nn.functional.cross_entropy(model(point), y, reduction="none") for point in points])
    theirs = official(model, n_iter=steps, norm="Linf", eps=1 / 8, loss="ce", device="cpu")
    theirs.init_hyperparam(x)
    best = theirs.attack_single_run(x, y, x_init=points[0])[2]
    rose = values[1] > values[0]  # their first check takes the first step for a rise in any case
    assert rose.sum() > 30
    assert torch.allclose(values.amax(0)[rose], best[rose], atol=1e-6)


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_every_restart_and_target_has_a_start_of_its_own(norm):
    model, threat = Waves(8), ThreatModel(norm=norm, eps=0.25)
    x, y = model.images(10)
    victim = Watched(model)
    APGD(threat=threat, loss="dlr", targets=2, restarts=3, steps=1).search(victim, x, y, noise_for(x))
    moved = victim.points[0].reshape(10, 6, 8) - x.flatten(1).numpy()[:, None]
    assert len(np.unique(moved.reshape(60, 8).round(6), axis=0)) == 60


def test_a_name_creates_the_attack():
    threat = ThreatModel(eps=0.1)
    assert attacks.get("apgd-ce", threat=threat) == APGD(threat=threat)
    assert attacks.get("apgd-t-steps20", threat=threat) == APGD(threat=threat, loss="dlr", targets=9, steps=20)
    assert attacks.get("apgd-dlr-restarts5", threat=threat) == APGD(threat=threat, loss="dlr", restarts=5)
    assert dataclasses.replace(attacks.get("apgd-ce", threat=threat), seed=1) == APGD(threat=threat, seed=1)


def test_an_ascent_that_starts_at_nan_continues_from_the_first_finite_value(linf):
    x, y = linf.first(20)
    calls = []

    def late(x: Tensor) -> Tensor:
        calls.append(len(x))
        return linf.model(x) * (torch.nan if len(calls) == 1 else 1)

    victim, rows = VictimModel(late), _Rows(x=x, y=y, target=y, noise=ImageNoise(0, torch.arange(20)))
    measure = partial(APGD(threat=linf.threat)._gradient, victim=victim, value=lambda z, y, _: cross_entropy(z, y))
    grid, rule = CandidateGrid(victim, linf.threat, x, y), _Dense(linf.threat, 10, 0.75)
    best = _ascend(rows, x, measure=measure, victim=victim, grid=grid, rule=rule, counts=False)
    assert (cross_entropy(linf.model(best), y) > cross_entropy(linf.model(x), y)).all()


def test_every_step_draws_new_points_around_the_image_for_its_mean_gradient():
    model = Waves(8)
    x, y = model.images(3)
    victim = Watched(model)
    attack = APGD(threat=ThreatModel(eps=0.1), steps=2, samples=2, smoothing=0.2)
    x = x.clamp(0.2, 0.8)  # no point is clipped
    attack.search(victim, x, y, noise_for(x))
    around = np.stack(victim.points).reshape(3, 2, 3, 8)  # step, sample, image
    centres = (around.max(1) + around.min(1)) / 2
    shapes = around[:, 0] - around[:, 1]
    assert np.abs(centres - x.flatten(1).numpy()).max() <= 0.1 * 1.2 + 1e-6
    assert np.abs(shapes).max() <= 2 * 0.2 * 0.1 + 1e-6
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (np.abs(shapes[one] - shapes[other]).max(1) > 1e-3).all()
