"""Square Attack: random search without gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import Square
from advnorm.attacks.base import attacked
from advnorm.attacks.search import Grid, Victim
from advnorm.attacks.square import _pile, _pile_up, _recolour, _State, _tiles, _Windows
from advnorm.threat import NORMS, ThreatModel


def state_of(x: Tensor, point: Tensor | None = None) -> _State:
    point = x if point is None else point
    noise = ImageNoise(0, torch.arange(len(x)))
    none = torch.zeros(len(x))
    return _State(x=x, y=none, noise=noise, point=point, margin=none, shown=none)


def test_squares_shrink_as_published():
    linf, l2 = (Square(threat=ThreatModel(norm=norm, eps=0.1)) for norm in ("Linf", "L2"))
    queries = [0, 10, 11, 50, 51, 200, 201, 500, 501, 1000, 1001, 2000, 2001, 4000, 4001, 4999]
    expected = [29, 29, 20, 20, 14, 14, 10, 10, 7, 7, 5, 5, 4, 4, 3, 3]  # sqrt(0.8 / 2^k · 32 · 32)
    assert [linf._side(query, 32, 32) for query in queries] == expected
    assert [l2._side(query, 32, 32) for query in queries] == [side // 2 * 2 + 1 for side in expected]
    assert l2._side(4999, 8, 8) == 3 and linf._side(4999, 8, 8) == 1 and linf._side(0, 4, 100) == 4


@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_the_pile_is_that_of_the_authors(norm):
    official = pytest.importorskip("pyautoattack.square").SquareAttack(None, norm=norm, eps=1.0, device="cpu")
    for side in (1, 2, 3, 5, 6, 9, 13):
        with torch.random.fork_rng():
            theirs = official.eta(side)
        ours = _pile(side, norm, torch.device("cpu"))
        assert any(torch.allclose(theirs, candidate, atol=1e-6) for candidate in (ours, ours.T))
        assert torch.linalg.vector_norm(ours, 2 if norm == "L2" else 1).item() == pytest.approx(1)


def test_a_window_is_a_square_inside_the_image():
    x = torch.zeros(200, 3, 7, 9)
    draws = ImageNoise(0, torch.arange(200)).uniform((2, 2))
    windows = _Windows(x, [5, 3], draws[..., 0], draws[..., 1])
    assert (windows.inside(0).sum((1, 2, 3)) == 25).all()
    inside = windows.inside(1)[:, 0]
    assert (inside.sum((1, 2)) == 9).all() and (inside.any(2).sum(1) == 3).all() and (inside.any(1).sum(1) == 3).all()
    assert inside.any(2).any(0).sum() == 6 and inside.any(1).any(0).sum() == 8  # all but the last place
    pattern = torch.arange(9.0).view(3, 3)
    turned = torch.arange(200).view(-1, 1, 1, 1) % 2 == 0
    filled = windows.filled(1, pattern, turned)
    assert torch.equal(filled[0, 0][inside[0]].view(3, 3), pattern)
    assert torch.equal(filled[1, 0][inside[1]].view(3, 3), pattern.T)


def test_linf_changes_one_square_to_one_colour():
    x = torch.full((50, 3, 8, 8), 0.5)
    (proposal,) = _recolour(state_of(x), ThreatModel(eps=0.1), [3], ImageNoise(1, torch.arange(50)).uniform((1, 8)))
    changed = proposal != x
    assert (changed.flatten(2).sum(2) == 9).all()
    assert torch.allclose((proposal - x)[changed].abs(), torch.tensor(0.1))
    assert ((proposal - x).sign().flatten(2).sum(2).abs() == 9).all()  # a channel's sign is one
    assert len({tuple(row.tolist()) for row in (proposal - x).sign().flatten(2).sum(2)}) > 3


def test_each_proposal_starts_from_what_was_accepted_before_it():
    threat, sides, side_of_image = ThreatModel(eps=0.1), [6, 4, 4, 1], 8
    x = ImageNoise(0, torch.arange(5)).uniform((3, 8, 8), "x")
    draws = ImageNoise(1, torch.arange(5)).uniform((4, 8))
    state, expected = state_of(x), x.clone()
    for query, proposal in enumerate(_recolour(state, threat, sides, draws)):
        painted, side = expected.clone(), sides[query]
        for image, draw in enumerate(draws[:, query].tolist()):
            top, left = (int(place * (side_of_image - side)) for place in draw[:2])
            for channel, sign in enumerate(draw[5:]):
                patch = (image, channel, slice(top, top + side), slice(left, left + side))
                painted[patch] = (x[patch] + (0.1 if sign >= 0.5 else -0.1)).clamp(0, 1)
        assert torch.allclose(proposal, painted, atol=1e-6)
        assert torch.equal(threat.project(proposal, x), proposal)
        if query != 1:  # one is refused
            state.point = expected = proposal


@pytest.mark.parametrize("norm", NORMS)
def test_images_that_stay_when_fooled_change_nothing_for_the_others(trained, norm, monkeypatch):
    t = trained[norm]
    x, y = t.first(40)
    results = []
    with attacked(t.model) as predict:
        for share in (0.0, 2.0):  # rows leave at once, or never
            monkeypatch.setattr(Grid, "DROP", share)
            attack = Square(threat=t.threat, queries=110)
            results.append(attack.search(Victim(predict), x, y, ImageNoise(0, torch.arange(40))))
    assert 0 < results[0].fooled.sum() < 40
    assert torch.equal(results[0].fooled, results[1].fooled)
    assert torch.allclose(results[0].x_adv, results[1].x_adv, atol=1e-5)


@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_l2_and_l1_spend_the_whole_budget_in_a_square(norm):
    threat = ThreatModel(norm=norm, eps=0.3)
    x = torch.full((50, 3, 8, 8), 0.5)
    first = _tiles(state_of(x), threat)
    if norm == "L2":
        assert torch.allclose(threat.distance(first, x), torch.tensor(0.3, dtype=torch.float64))
    else:
        first = x + (first - x) * 0.3 / threat.distance(first, x).float().view(-1, 1, 1, 1)
    draws = ImageNoise(1, torch.arange(50)).uniform((1, 8))
    (second,) = _pile_up(state_of(x, first), threat, [3], draws)
    to, source = (_Windows(x, [3], draws[..., i], draws[..., i + 1]).inside(0).expand_as(x) for i in (0, 2))
    assert ((second == x) | to | ~source).all()  # the source is empty, but for where it is also the destination
    if norm == "L2":
        assert torch.allclose(threat.distance(second, x), torch.tensor(0.3, dtype=torch.float64))
    assert (second - first)[to].abs().max() > 0.01


@pytest.mark.parametrize("norm", NORMS)
def test_the_margin_never_rises_with_more_queries(trained, norm):
    t = trained[norm]
    x, y = t.first(40)
    margins = []
    with attacked(t.model) as predict:
        for queries in (1, 26, 120, 400):
            found = Square(threat=t.threat, queries=queries).search(
                Victim(predict), x, y, ImageNoise(0, torch.arange(40))
            )
            margins.append(found.margin.masked_fill(found.fooled, -torch.inf))
    for before, after in itertools.pairwise(margins):
        assert (after <= before).all()
    assert (margins[-1] < margins[0]).any()


def test_no_point_is_judged_twice():
    judged = 0

    def robust(x: Tensor) -> Tensor:
        nonlocal judged
        judged += len(x)
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    def close(x: Tensor) -> Tensor:  # every point looks as if it might fool, and none is better than the first
        return torch.tensor([[0.1, 0.0]]).expand(len(x), 2)

    x, y = torch.rand(6, 1, 5, 5), torch.zeros(6, dtype=torch.long)
    found = Square(threat=ThreatModel(eps=0.1), queries=1000).search(
        Victim(robust, search=close, tolerance=2.0), x, y, ImageNoise(0, torch.arange(6))
    )
    assert judged == 3 * 6 and not found.fooled.any()  # the image's margin, the image, the stripes


def test_it_needs_no_gradients(linf):
    class Rounded(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = linf.model

        def forward(self, x):
            return self.model(x.mul(20).round().div(20)).detach()

    x, y = linf.first(100)
    model = Rounded()
    x_adv = Square(threat=linf.threat, queries=200)(model, x, y)
    assert (model(x_adv).argmax(1) == y).sum() < (model(x).argmax(1) == y).sum() - 3


def test_restarts_help(linf):
    x, y = linf.first(200)
    robust = [
        (linf.model(Square(threat=linf.threat, queries=40, restarts=n)(linf.model, x, y)).argmax(1) == y).sum().item()
        for n in (1, 8)
    ]
    assert robust[1] < robust[0]


def test_only_images_have_squares():
    with pytest.raises(ConfigError, match=r"shape \(N, channels, height, width\)"):
        Square(threat=ThreatModel(eps=0.1))(nn.Linear(4, 3), torch.rand(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ConfigError, match="queries must be .*; p_init must lie"):
        Square(threat=ThreatModel(eps=0.1), queries=0, p_init=0)
    assert attacks.get("square-queries7", threat=ThreatModel(eps=0.1)).queries == 7
