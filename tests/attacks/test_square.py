"""Square Attack: random search without gradients."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left

import pytest
import torch
from torch import Tensor, nn

from advnorm import attacks
from advnorm._core.seeding import ImageNoise
from advnorm.attacks import Square
from advnorm.attacks.losses import label_margin
from advnorm.attacks.model_access import predicting
from advnorm.attacks.search import CandidateGrid, SearchResult
from advnorm.attacks.square import HALVINGS, _pile, _pile_up, _recolour, _State, _tiles, _verification_queries, _Windows
from advnorm.attacks.victim import VictimModel
from advnorm.threat import THREAT_NORMS, ThreatModel
from support.autoattack_models import Double
from support.problems import raises_problem


def state_of(x: Tensor, point: Tensor | None = None, query: int = 0) -> _State:
    noise, none = ImageNoise(0, torch.arange(len(x))), torch.zeros(len(x))
    query_N = torch.full((len(x),), query)
    return _State(
        x=x, y=none, noise=noise, point=x if point is None else point, margin=none, offered=none, query=query_N
    )


def places(rows: int, queries: int) -> Tensor:
    """Of all queries of all rows."""
    return torch.arange(rows * queries).view(rows, queries)


def test_squares_shrink_as_published():
    linf, l2 = (Square(threat=ThreatModel(norm=norm, eps=0.1)) for norm in ("Linf", "L2"))
    expected = [29, 20, 14, 10, 7, 5, 4, 3, 2, 1]  # sqrt(0.8 / 2^k · 32 · 32)
    assert linf._sides(32, 32) == (*expected[:8], 2, 1)
    assert l2._sides(32, 32) == (*(side // 2 * 2 + 1 for side in expected[:8]), 3, 3)
    assert l2._sides(8, 8)[7] == 3 and linf._sides(8, 8)[7] == 1 and linf._sides(4, 100)[0] == 4


def test_a_square_has_the_side_of_its_query():
    x = torch.full((1, 1, 32, 32), 0.5)
    attack = Square(threat=ThreatModel(eps=0.1))
    queries = [0, 10, 11, 50, 51, 200, 201, 500, 501, 1000, 1001, 2000, 2001, 4000, 4001, 4999]
    for query, side in zip(queries, [29, 29, 20, 20, 14, 14, 10, 10, 7, 7, 5, 5, 4, 4, 3, 3]):
        proposal = attack._proposals(state_of(x, query=query), 1)(places(1, 1))
        assert (proposal != x).sum() == side**2, query


@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_the_pile_is_that_of_the_authors(norm):
    official = pytest.importorskip("pyautoattack.square").SquareAttack(None, norm=norm, eps=1.0, device="cpu")
    for side in (1, 2, 3, 5, 6, 9, 13):
        with torch.random.fork_rng():
            theirs = official.eta(side)
        ours = _pile(side, norm)
        assert any(torch.allclose(theirs, candidate, atol=1e-6) for candidate in (ours, ours.T))
        assert torch.linalg.vector_norm(ours, 2 if norm == "L2" else 1).item() == pytest.approx(1)


def test_a_window_is_a_square_inside_the_image():
    x, at = torch.zeros(200, 3, 7, 9), places(200, 2)
    draws = ImageNoise(0, torch.arange(400)).uniform((2,))
    windows = _Windows(x, (5, 3), torch.arange(2).repeat(200), draws[:, 0], draws[:, 1])
    assert (windows.inside(at[:, :1]).sum((1, 2, 3, 4)) == 25).all()
    inside = windows.inside(at)[:, 1, 0]
    assert (inside.sum((1, 2)) == 9).all() and (inside.any(2).sum(1) == 3).all() and (inside.any(1).sum(1) == 3).all()
    assert inside.any(2).any(0).sum() == 6 and inside.any(1).any(0).sum() == 8  # all but the last place
    patterns = torch.zeros(2, 5, 5)
    patterns[1, :3, :3] = torch.arange(9.0).view(3, 3)
    turned = torch.arange(200).view(-1, 1, 1, 1, 1) % 2 == 0
    filled = windows.filled(at, patterns, turned)[:, 1]
    assert torch.equal(filled[0, 0][inside[0]].view(3, 3), patterns[1, :3, :3])
    assert torch.equal(filled[1, 0][inside[1]].view(3, 3), patterns[1, :3, :3].T)


def test_linf_changes_one_square_to_one_colour():
    x = torch.full((50, 3, 8, 8), 0.5)
    level, draws = torch.zeros(50, dtype=torch.long), ImageNoise(1, torch.arange(50)).uniform((8,))
    proposal = _recolour(state_of(x), ThreatModel(eps=0.1), (3,), level, draws)(places(50, 1))
    changed = proposal != x
    assert (changed.flatten(2).sum(2) == 9).all()
    assert torch.allclose((proposal - x)[changed].abs(), torch.tensor(0.1))
    assert ((proposal - x).sign().flatten(2).sum(2).abs() == 9).all()  # a channel's sign is one
    assert len({tuple(row.tolist()) for row in (proposal - x).sign().flatten(2).sum(2)}) > 3


def at_once(monkeypatch: pytest.MonkeyPatch, k: int) -> None:
    monkeypatch.setattr(Square, "_queries_per_forward", lambda *_: k)


def one_image_after_the_other(attack: Square, model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Linf without batches, blocks or verification: the last point of each image, and its margin."""
    eps, size = attack.threat.eps, x.shape[-1]
    points, margins = [], []
    for image, (clean, label) in enumerate(zip(x, y)):
        noise = ImageNoise(0, torch.tensor([image])).fold("variant").fold(0)
        point = attack.threat.project(clean + eps * noise.signs((len(clean), 1, size), "stripes"), clean[None])[0]
        margin = label_margin(model(point[None]), label[None])
        for query in range(attack.queries):
            draw = noise.uniform((25, 5 + len(clean)), query // 25)[0, query % 25]
            side = max(round((0.8 / 2 ** bisect_left(HALVINGS, query)) ** 0.5 * size), 1)
            top, left = (int(place * max(size - side, 1)) for place in draw[:2])
            proposal = point.clone()
            for channel, raised in enumerate((draw[5:] >= 0.5).tolist()):
                patch = (channel, slice(top, top + side), slice(left, left + side))
                proposal[patch] = clean[patch] + (eps if raised else -eps)
            proposal = attack.threat.project(proposal[None], clean[None])[0]
            there = label_margin(model(proposal[None]), label[None])
            if there < margin:
                point, margin = proposal, there
        points.append(point)
        margins.append(margin)
    return torch.stack(points), torch.cat(margins)


@pytest.mark.parametrize("k", [1, 4])
def test_each_proposal_starts_from_what_was_accepted_before_it(linf, k, monkeypatch):
    at_once(monkeypatch, k)
    model, (x, y) = Double(linf.model), linf.first(16)
    attack = Square(threat=linf.threat, queries=130)
    found = attack.search(VictimModel(model), x, y, ImageNoise(0, torch.arange(16)))
    points, margins = one_image_after_the_other(attack, model, x, y)
    robust = ~found.fooled
    assert torch.equal(found.fooled, margins <= 0) and 3 < robust.sum() < 13  # margins fall, so the last one decides
    assert torch.equal(found.x_adv[robust], points[robust]) and torch.equal(found.margin[robust], margins[robust])


@pytest.mark.parametrize(
    ("norm", "tolerance", "restarts"),
    [
        ("Linf", 0.5, 2),
        ("L2", 0.0, 1),
        ("L1", 0.5, 1),
        *(
            pytest.param(norm, *rest, marks=pytest.mark.slow)
            for norm, *rest in [("Linf", 0.0, 1), ("Linf", 0.5, 1), ("L2", 0.5, 1), ("L2", 0.5, 2)]
        ),
        *(pytest.param("L1", *rest, marks=pytest.mark.slow) for rest in [(0.0, 1), (0.5, 2)]),
    ],
)
def test_several_queries_in_one_forward_change_nothing(trained, norm, tolerance, restarts, monkeypatch):
    """This also holds if a surrogate guides the search and the model rejects some of its candidates."""
    t = trained[norm]
    x, y = t.first(40)
    model, rough = Double(t.model), copy.deepcopy(t.model)
    with torch.no_grad():
        for parameter in rough.parameters():
            parameter.copy_(parameter.bfloat16())
    rough = Double(rough)
    threat = ThreatModel(norm=norm, eps=3 * t.threat.eps)  # at which images fall one after the other
    attack = Square(threat=threat, queries=320, restarts=restarts)
    results: dict[int, SearchResult] = {}
    sizes: dict[int, list[int]] = {}
    decided: dict[int, int] = {}
    for k in (1, 2, 5):

        def search(z: Tensor, k: int = k) -> Tensor:
            sizes[k].append(len(z))
            return (rough if tolerance else model)(z)

        def decide(z: Tensor, k: int = k) -> Tensor:
            decided[k] += len(z)
            return model(z)

        sizes[k], decided[k] = [], 0
        at_once(monkeypatch, k)
        victim = VictimModel(decide, search_predict=search, tolerance=tolerance)
        results[k] = attack.search(victim, x, y, ImageNoise(0, torch.arange(40)))
        assert victim.forwards == sum(sizes[k]) + decided[k]
    one = results[1]
    assert 20 < one.fooled.sum() < 38 and len(set(sizes[1])) > 3
    assert len(sizes[1]) == 1 + 320
    assert all(size % k == 0 for k in sizes for size in sizes[k][1:])
    for k in (2, 5):
        assert torch.equal(results[k].fooled, one.fooled) and torch.equal(results[k].margin, one.margin)
        assert torch.equal(results[k].x_adv, one.x_adv)
        assert decided[k] == decided[1] and len(sizes[k]) < 0.8 * len(sizes[1]) and sum(sizes[k]) > sum(sizes[1])
    rejected = decided[1] - 40 * restarts - int(one.fooled.sum())  # at first all clean images are verified
    assert rejected > 10 if tolerance else rejected == 0


def test_points_are_verified_often_at_first():
    at = [*range(0, 200, 25), 200, 300, 400, 500, 530]
    expected = [next(verified for verified in at if verified >= query) for query in range(531)]
    assert _verification_queries(530, torch.device("cpu")).tolist() == expected


def test_as_many_queries_go_into_a_forward_as_pay():
    gpu, attack = torch.device("cuda"), Square(threat=ThreatModel(eps=0.1))
    rows = (1, 3, 10, 60, 150, 400, 512, 513, 4000)
    k = [attack._queries_per_forward(n, gpu, 4096) for n in rows]
    assert k == sorted(k, reverse=True) and k[:4] > [40, 20, 10, 5] and k[-4:] == [2, 2, 1, 1]
    assert all(n * many <= 1024 for n, many in zip(rows, k) if many > 1)
    assert all(n * attack._queries_per_forward(n, gpu, 100) <= 100 for n in (1, 3, 10, 60, 100))  # memory for no more
    assert attack._queries_per_forward(10, gpu, None) == k[2] and attack._queries_per_forward(200, gpu, 100) == 1
    assert attack._queries_per_forward(10, torch.device("cpu"), None) == 1
    for statistics in ("batch", "batch_frozen"):  # would be of a row's proposals in place of the images
        assert Square(threat=ThreatModel(eps=0.1), statistics=statistics)._queries_per_forward(10, gpu, None) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_several_queries_in_one_forward_change_no_verdict_on_a_gpu(trained, norm, monkeypatch):
    t = trained[norm]
    x, y = (v.cuda() for v in t.first(60))
    victims, results = [VictimModel(Double(t.model).cuda()) for _ in range(2)], []
    for victim in victims:
        noise = ImageNoise(0, torch.arange(60, device="cuda"))
        results.append(Square(threat=t.threat, queries=300).search(victim, x, y, noise))
        at_once(monkeypatch, 1)
    assert victims[0].forwards > victims[1].forwards
    assert torch.equal(results[0].fooled, results[1].fooled) and 5 < results[0].fooled.sum() < 55
    assert torch.allclose(results[0].margin, results[1].margin, atol=1e-3)


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_images_that_stay_when_fooled_change_nothing_for_the_others(trained, norm, monkeypatch):
    t = trained[norm]
    x, y = t.first(40)
    results = []
    with predicting(t.model) as predict:
        for share in (0.0, 2.0):  # rows leave at once, or never
            monkeypatch.setattr(CandidateGrid, "DROP", share)
            attack = Square(threat=t.threat, queries=110)
            results.append(attack.search(VictimModel(predict), x, y, ImageNoise(0, torch.arange(40))))
    assert 0 < results[0].fooled.sum() < 40
    assert torch.equal(results[0].fooled, results[1].fooled)
    assert torch.allclose(results[0].x_adv, results[1].x_adv, atol=1e-5)


@pytest.mark.parametrize("norm", ["L2", "L1"])
def test_l2_and_l1_spend_the_whole_budget_in_a_square(norm):
    threat = ThreatModel(norm=norm, eps=0.3)
    x = torch.full((50, 3, 8, 8), 0.5)
    first = _tiles(x, ImageNoise(0, torch.arange(50)), threat)
    if norm == "L2":
        assert torch.allclose(threat.distance(first, x), torch.tensor(0.3, dtype=torch.float64))
    else:
        first = x + (first - x) * 0.3 / threat.distance(first, x).float().view(-1, 1, 1, 1)
    level, draws, at = torch.zeros(50, dtype=torch.long), ImageNoise(1, torch.arange(50)).uniform((8,)), places(50, 1)
    second = _pile_up(state_of(x, first), threat, (3,), level, draws)(at)
    windows = (_Windows(x, (3,), level, draws[:, i], draws[:, i + 1]) for i in (0, 2))
    to, source = (window.inside(at)[:, 0].expand_as(x) for window in windows)
    assert ((second == x) | to | ~source).all()  # the source is empty, but for where it is also the destination
    if norm == "L2":
        assert torch.allclose(threat.distance(second, x), torch.tensor(0.3, dtype=torch.float64))
    assert (second - first)[to].abs().max() > 0.01


@pytest.mark.parametrize("norm", THREAT_NORMS)
def test_the_margin_never_rises_with_more_queries(trained, norm):
    t = trained[norm]
    x, y = t.first(40)
    margins = []
    with predicting(t.model) as predict:
        for queries in (1, 26, 120, 400):
            found = Square(threat=t.threat, queries=queries).search(
                VictimModel(predict), x, y, ImageNoise(0, torch.arange(40))
            )
            margins.append(found.margin.masked_fill(found.fooled, -torch.inf))
    for before, after in itertools.pairwise(margins):
        assert (after <= before).all()
    assert (margins[-1] < margins[0]).any()


def test_no_point_is_verified_twice():
    decided = 0

    def robust(x: Tensor) -> Tensor:
        nonlocal decided
        decided += len(x)
        return torch.tensor([[1.0, 0.0]]).expand(len(x), 2)

    def close(x: Tensor) -> Tensor:  # every point looks as if it might fool, and none is better than the first
        return torch.tensor([[0.1, 0.0]]).expand(len(x), 2)

    x, y = torch.rand(6, 1, 5, 5), torch.zeros(6, dtype=torch.long)
    found = Square(threat=ThreatModel(eps=0.1), queries=1000).search(
        VictimModel(robust, search_predict=close, tolerance=2.0), x, y, ImageNoise(0, torch.arange(6))
    )
    assert decided == 3 * 6 and not found.fooled.any()  # the image's margin, the image, the stripes


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


def test_square_needs_images_with_height_and_width():
    with raises_problem("wrong_shape", "images"):
        Square(threat=ThreatModel(eps=0.1))(nn.Linear(4, 3), torch.rand(2, 4), torch.zeros(2, dtype=torch.long))
    with raises_problem("out_of_range", "queries") as caught:
        Square(threat=ThreatModel(eps=0.1), queries=0, p_init=0)
    assert {problem.field for problem in caught.value.problems} == {"queries", "p_init"}
    assert attacks.get("square-queries7", threat=ThreatModel(eps=0.1)).queries == 7
