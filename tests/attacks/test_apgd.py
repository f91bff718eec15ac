"""Auto-PGD, and what the searches of AutoAttack share."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.errors import AdvnormError, ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import APGD, PGD
from advnorm.attacks.apgd import _Dense
from advnorm.attacks.base import attacked
from advnorm.attacks.search import (
    Grid,
    Halving,
    Victim,
    bucket,
    filled,
    margin_of,
    onto_l1_and_box,
    ranked_targets,
)
from advnorm.threat import NORMS, ThreatModel


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


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("loss", ["ce", "dlr"])
def test_the_point_kept_has_the_highest_value_seen(trained, norm, loss):
    x, y = trained[norm].first(40)
    seen = []
    with attacked(trained[norm].model) as predict:

        class Spy(Victim):
            def gradient(self, x, value, samples=1):
                logits, values, grads = super().gradient(x, value, samples)
                seen.append(margin_of(logits, y[: len(x)]))
                return logits, values, grads

        victim = Spy(predict)
        original, Grid.DROP = Grid.DROP, 2.0  # keep all rows, so that they can be told apart
        try:
            attack = APGD(threat=trained[norm].threat, steps=20, loss=loss)
            found = attack.search(victim, x, y, noise_for(x))
        finally:
            Grid.DROP = original
    clean = margin_of(victim.strict(x), y)
    everything = torch.stack([clean, *seen[-21 if norm != "L1" else -9 :]])
    resisted = ~found.fooled
    assert resisted.any() and found.fooled.any()
    assert torch.equal(found.margin[resisted], everything.min(0).values[resisted])


@pytest.mark.parametrize("norm", NORMS)
def test_more_steps_lower_the_number(trained, norm):
    t = trained[norm]
    x, y = t.first(200)
    robust = []
    for steps in (3, 10, 100):
        x_adv = APGD(threat=t.threat, steps=steps, loss="dlr", targets=9)(t.model, x, y)
        robust.append((t.model(x_adv).argmax(1) == y).sum().item())
    assert robust[0] >= robust[1] >= robust[2] > 0


def test_it_is_no_weaker_than_pgd_with_as_many_steps(linf):
    x, y = linf.first(300)
    pgd, apgd = PGD(threat=linf.threat, steps=100, keep="worst"), APGD(threat=linf.threat)
    robust = [(linf.model(attack(linf.model, x, y)).argmax(1) == y).sum().item() for attack in (pgd, apgd)]
    assert robust[1] <= robust[0] + 1


def test_targets_are_the_most_likely_other_classes():
    logits = torch.tensor([[0.1, 3.0, 2.0, 1.0], [5.0, 1.0, 2.0, 3.0]])
    assert ranked_targets(logits, torch.tensor([1, 3]), 2).tolist() == [[2, 3], [0, 2]]
    assert ranked_targets(logits, torch.tensor([1, 3]), 9).shape == (2, 3)


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
    victim = Victim(Noisy())
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
    with pytest.raises(ConfigError, match="steps must be .*; targets must be .*; unknown loss 'kl'.*; rho must"):
        APGD(threat=ThreatModel(eps=0.1), steps=0, targets=-1, loss="kl", rho=1.5)


# -- the projection onto the L1 ball and the box -----------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), eps=st.floats(0.01, 30), spread=st.floats(0.01, 3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_l1_projection_is_the_nearest_point_of_both(seed, eps, spread):
    noise = ImageNoise(seed, torch.arange(4))
    x = (1.4 * noise.uniform((1, 4, 5), "x") - 0.2).clamp(0, 1)
    point = x + spread * noise.normal((1, 4, 5), "point")
    nearest = onto_l1_and_box(x, point, eps)
    assert nearest.min() >= 0 and nearest.max() <= 1
    assert ((nearest - x).abs().flatten(1).sum(1) <= eps * (1 + 1e-5) + 1e-6).all()
    # p is the nearest point of a convex set if and only if (point - p)·(z - p) <= 0 for every z in the set.
    for draw in range(40):
        direction = noise.normal((1, 4, 5), draw) * (noise.uniform((1, 4, 5), f"mask {draw}") < 0.3)
        other = (x + direction).clamp(0, 1) - x
        length = other.abs().flatten(1).sum(1).clamp_min(1e-12)
        z = x + other * (eps / length).clamp_max(1).view(-1, 1, 1, 1)
        for towards in (z, nearest + 1e-2 * (z - nearest), x):
            product = ((point - nearest) * (towards - nearest)).double().flatten(1).sum(1)
            assert (product <= 2e-5 * max(1, eps) * max(1, spread)).all()


def test_the_l1_projection_leaves_what_is_inside_alone():
    x = torch.full((2, 1, 3, 3), 0.5)
    point = x + torch.tensor([0.01, -0.02])[:, None, None, None]
    assert torch.allclose(onto_l1_and_box(x, point, 1.0), point, atol=1e-7)
    assert torch.equal(onto_l1_and_box(x, x, 1.0), x)


# -- images leave, memory runs out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("targets", [0, 4])
def test_dropping_fooled_images_changes_nothing_but_the_work(trained, norm, targets, monkeypatch):
    t = trained[norm]
    model = Double(copy.deepcopy(t.model))
    x, y = t.first(60)
    results, work = [], []
    for share in (0.0001, 0.25, 2.0):  # at once, as usual, never
        monkeypatch.setattr(Grid, "DROP", share)
        with attacked(model) as predict:
            victim = Victim(predict)
            attack = APGD(threat=t.threat, steps=25, loss="dlr", targets=targets)
            results.append(attack.search(victim, x, y, noise_for(x)))
            work.append(victim.backwards)
    for found in results[1:]:
        assert torch.equal(found.fooled, results[0].fooled)
        assert torch.equal(found.x_adv, results[0].x_adv)
    assert work[0] <= work[1] < work[2]


def test_a_refuted_candidate_makes_way_for_the_next():
    x, y = torch.full((3, 1, 2, 2), 0.5), torch.zeros(3, dtype=torch.long)
    verdicts = iter([[False, True], [True]])
    victim = Victim(lambda x: torch.zeros(len(x), 2), search=lambda x: x.flatten(1), tolerance=0.2)
    victim.fooled = lambda x, y: torch.tensor(next(verdicts))  # type: ignore[method-assign]
    grid = Grid(victim, ThreatModel(eps=0.1), x, y)
    grid.see(x + 0.01, torch.tensor([0.1, -1.0, 0.3]))
    assert grid.settle().tolist() == [0, 2]
    grid.see((x + 0.02)[[0, 2]], torch.tensor([0.15, 0.3]))
    grid.settle()
    found = grid.finish()
    assert found.fooled.tolist() == [True, True, False]
    assert torch.allclose((found.x_adv - x).flatten(1).amax(1), torch.tensor([0.02, 0.01, 0.01]))


def test_a_batch_size_halves_until_it_fits_and_only_the_failed_part_is_repeated():
    halving, calls = Halving(64), []

    def work(part: slice) -> int:
        calls.append(part.stop - part.start)
        if calls[-1] > 10:
            raise torch.OutOfMemoryError("out of memory")
        return calls[-1]

    assert sum(halving.over(30, work)) == 30
    assert calls == [30, 15, 7, 7, 7, 7, 2]
    assert halving.halved == [30, 15] and halving.size == 7


def test_rows_are_filled_up_to_few_sizes():
    assert [bucket(rows, 16) for rows in (1, 2, 3, 9, 16, 17, 32, 33, 708)] == [1, 2, 4, 16, 16, 32, 32, 48, 720]
    x = torch.rand(3, 2, requires_grad=True)
    assert filled(x, 3) is x
    more = filled(x, 5)
    assert torch.equal(more, x[[0, 1, 2, 0, 0]])
    (gradient,) = torch.autograd.grad(more[:3].sum() + 7 * more[3:].sum(), x)
    assert torch.equal(gradient, torch.ones(3, 2))


def test_one_image_that_does_not_fit_is_told():
    def work(part: slice) -> None:
        raise torch.OutOfMemoryError("out of memory")

    with pytest.raises(AdvnormError, match="not suffice for a single image"):
        Halving(4).over(4, work)
    with pytest.raises(AdvnormError, match="not suffice for 2 images"):
        Halving(4, least=2).over(4, work)


@pytest.mark.parametrize("count", range(1, 30))
def test_no_part_is_smaller_than_asked_for_even_where_memory_runs_out(count):
    def work(part: slice) -> range:
        if part.stop - part.start > 5:
            raise torch.OutOfMemoryError("out of memory")
        return range(part.start, part.stop)

    parts = Halving(8, least=2).over(count, work)
    assert [place for part in parts for place in part] == list(range(count))
    assert all(len(part) >= 2 for part in parts) or count == 1


def test_a_victim_splits_forwards_and_gradients(linf):
    x, y = linf.first(20)
    whole, parts = Victim(linf.model), Victim(linf.model, memory=Halving(7))

    def value(logits: Tensor, part: slice) -> Tensor:
        return logits[torch.arange(len(logits)), y[part]]

    assert torch.allclose(whole.strict(x), parts.strict(x), atol=1e-5)
    for a, b in zip(whole.gradient(x, value), parts.gradient(x, value)):
        assert torch.allclose(a, b, atol=1e-5)
    for a, b in zip(whole.jacobian(x), parts.jacobian(x)):
        assert torch.allclose(a, b, atol=1e-5)
    assert (whole.forwards, whole.backwards) == (60, 20 + 200)


def test_the_jacobian_holds_the_gradient_of_each_logit(linf):
    x, _ = linf.first(3)
    expected = torch.stack([torch.autograd.functional.jacobian(lambda v: linf.model(v[None])[0], image) for image in x])
    assert torch.allclose(Victim(linf.model).jacobian(x)[1], expected, atol=1e-5)


def test_a_name_says_which():
    threat = ThreatModel(eps=0.1)
    assert attacks.get("apgd-ce", threat=threat) == APGD(threat=threat)
    assert attacks.get("apgd-t-steps20", threat=threat) == APGD(threat=threat, loss="dlr", targets=9, steps=20)
    assert attacks.get("apgd-dlr-restarts5", threat=threat) == APGD(threat=threat, loss="dlr", restarts=5)
    assert dataclasses.replace(attacks.get("apgd-ce", threat=threat), seed=1) == APGD(threat=threat, seed=1)
