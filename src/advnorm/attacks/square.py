"""Square Attack: random search with squares, without gradients.

Sources: Andriushchenko et al. 2020, "Square Attack: a query-efficient black-box adversarial attack via random search"
(Linf, L2); Croce & Hein 2021, "Mind the box" (L1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import raise_all
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Option, register
from advnorm.attacks.search import Found, Grid, Search, Victim, margin_of, near, norm_of, take
from advnorm.threat import ThreatModel, per_image

#: Queries after which the share of the pixels that a square covers halves (Andriushchenko et al. 2020, section 5).
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
#: Random numbers are drawn for so many queries at a time.
BLOCK = 25
#: Points are judged after every block up to this query, and then after every fourth: few fall so late.
EARLY, LATER = 8 * BLOCK, 4 * BLOCK
#: On a GPU a forward costs as much as this many rows however few it has, and more than so many rows gain nothing.
IDLE, ROWS = 64, 1024
#: About this share of all proposals is better than the best point, from the 10th query to the last.
BETTER = 0.04
#: Steps of several queries between two looks at what is to be judged and who is done.
STEPS = 10


@dataclass(frozen=True, kw_only=True)
class Square(Search):
    """Random search on the margin ``z_y - max_{j≠y} z_j``: a changed square stays where the margin falls.

    ``p_init``: share of the pixels that the first squares cover; it halves after 10, 50, 200, 500, 1000, ... queries.
    """

    by_gradients = False

    queries: int = 5000
    p_init: float = 0.8
    restarts: int = 1

    def problems(self) -> list[str]:
        problems = super().problems() + self.counted("queries", "restarts")
        if not 0 < self.p_init <= 1:
            problems.append(f"p_init must lie in (0, 1], got {self.p_init!r}")
        return problems

    def misfits(self, shape: Sequence[int], classes: int) -> list[str]:
        if len(shape) == 3:
            return []
        return [f"Square needs images of shape (N, channels, height, width), got {('N', *shape)}"]

    def variants(self, classes: int) -> int:
        return self.restarts

    def forwards(self, classes: int) -> int:
        return (self.queries + 2) * self.restarts

    def search(self, victim: Victim, x: Tensor, y: Tensor, noise: ImageNoise) -> Found:
        raise_all(self.misfits(x.shape[1:], 2), "bad batch")
        grid = Grid(victim, self.threat, x, y, self.restarts)
        x, y, noise = grid.rows(x), grid.rows(y), grid.noise(noise)
        grid.see(x, margin_of(victim.strict(x), y))
        kept = grid.settle()
        if kept is not None:
            x, y, noise = take(x, kept), take(y, kept), take(noise, kept)
        if not len(y):
            return grid.finish()
        start = _stripes if self.threat.norm == "Linf" else _tiles
        point = near(self.threat, x)(start(x, noise, self.threat))
        margin = victim.margin(victim.logits(point), y)
        never = torch.full_like(margin, torch.inf)
        state = _State(x=x, y=y, noise=noise, point=point, margin=margin, shown=never, query=torch.zeros_like(y))
        state = self._settled(grid, state)
        while len(state.y):
            self._advance(victim, state, self._at_once(len(state.y), x.device, victim.memory.size))
            state = self._settled(grid, state)
        return grid.finish()

    def _at_once(self, rows: int, device: torch.device, memory: int | None) -> int:
        """How many queries of each row go into one forward.

        Where a share b of the proposals is better, k of them take a row ``(1 - (1 - b)^k) / b`` queries further on
        average, and cost ``idle + k rows`` rows: about ``k = sqrt(2 idle / (b rows))`` pays best.
        """
        if device.type == "cpu" or self.statistics != "running":  # a batch's own statistics are of one query each
            return 1
        best = round(math.sqrt(2 * IDLE / (BETTER * rows)))
        return max(1, min(best, min(ROWS, memory or ROWS) // rows))

    def _advance(self, victim: Victim, state: _State, k: int) -> None:
        """Some steps, each of the next k queries of every row in one forward; a row is at a query of its own.

        All k start from the row's point. The first that is better becomes the point, and those after it, which should
        have started from there, are asked anew: k changes nothing but the time.
        """
        # One query at a time all rows come together to where points are judged.
        steps = min(BLOCK if k == 1 else STEPS, math.ceil((self.queries - int(state.query.min())) / k))
        propose = self._proposals(state, steps * k)
        row, ahead = (torch.arange(count, device=state.x.device) for count in (len(state.y), k))
        first = (state.query - row * steps * k)[:, None]
        y = state.y.repeat_interleave(k)
        for _ in range(steps):
            query = state.query[:, None] + ahead
            proposals = propose(query - first)
            margin = victim.margin(victim.logits(proposals), y)
            stop = self._stop(victim, state)
            better = (margin.view(-1, k) < state.margin[:, None]) & (query < stop[:, None])
            refused = torch.where(better, ahead, k).amin(1)
            some, at = refused < k, refused.clamp_max(k - 1)
            chosen = row * k + at
            state.point = torch.where(per_image(some, state.point), proposals.index_select(0, chosen), state.point)
            state.margin = torch.where(some, margin.index_select(0, chosen), state.margin)
            state.query = torch.minimum(state.query + at + 1, stop)

    def _proposals(self, state: _State, count: int) -> _Propose:
        """What is proposed at the next ``count`` queries of the first row, of the second, and so on."""
        device, blocks = state.x.device, math.ceil((BLOCK - 1 + count) / BLOCK)
        row = torch.arange(len(state.y), device=device)[:, None]
        block = state.query[:, None] // BLOCK + torch.arange(blocks, device=device)
        noise = state.noise.select(row.expand_as(block).flatten())
        draws = noise.uniform((BLOCK, 5 + state.x.shape[1]), block.flatten())
        query = state.query[:, None] + torch.arange(count, device=device)
        draws = draws.flatten(0, 1)[(query + (row * blocks - block[:, :1]) * BLOCK).flatten()]
        level = torch.bucketize(query.flatten(), torch.tensor(HALVINGS, device=device))
        propose = _recolour if self.threat.norm == "Linf" else _pile_up
        return propose(state, self.threat, self._sides(*state.x.shape[2:]), level, draws)

    def _stop(self, victim: Victim, state: _State) -> Tensor:
        """The query at which each row waits for its point to be judged; the end where there is nothing to judge.

        So the same points are judged, and the verdicts are the same, at any pace.
        """
        suspect = (state.margin <= victim.tolerance) & (state.margin < state.shown)
        return torch.where(suspect, _judgements(self.queries, state.x.device)[state.query], self.queries)

    def _settled(self, grid: Grid, state: _State) -> _State:
        """Have the points judged for which rows wait, an image's rows in turn, and leave out what is done."""
        behind = state.query.view(-1, grid.variants).amin(1)
        waiting = (state.query == self._stop(grid.victim, state)) & (state.query == grid.rows(behind))
        # What the grid has judged already need not be judged again.
        grid.see(state.point, state.margin.masked_fill(~waiting | (state.margin >= state.shown), torch.inf))
        state.shown = torch.where(waiting, state.margin, state.shown)
        kept = grid.settle(finished=behind == self.queries)
        return state if kept is None else take(state, kept)

    def _sides(self, height: int, width: int) -> tuple[int, ...]:
        """Sides of the squares before and after each halving: ``sqrt(p h w)``; for L2 and L1 odd and at least 3."""
        shares = (self.p_init / 2**halvings for halvings in range(len(HALVINGS) + 1))
        sides = (max(round(math.sqrt(share * height * width)), 1) for share in shares)
        if self.threat.norm != "Linf":
            sides = (max(side, 3) // 2 * 2 + 1 for side in sides)
        return tuple(min(side, height, width) for side in sides)


#: Proposals ``(rows · k, ...)`` of the queries at some places ``(rows, k)``.
_Propose = Callable[[Tensor], Tensor]


@dataclass
class _State:
    """Of each row."""

    x: Tensor
    y: Tensor
    noise: ImageNoise
    point: Tensor
    margin: Tensor
    shown: Tensor  # the margin when the grid last saw the point
    query: Tensor  # the next one


def _stripes(x: Tensor, noise: ImageNoise, threat: ThreatModel) -> Tensor:
    """Linf: vertical stripes of ±eps."""
    _, channels, _, width = x.shape
    return x + threat.eps * noise.signs((channels, 1, width), "stripes")


def _recolour(state: _State, threat: ThreatModel, sides: tuple[int, ...], level: Tensor, draws: Tensor) -> _Propose:
    """Linf: at each query a square of ±eps, of one colour."""
    project = near(threat, state.x)
    low, high = project(state.x - threat.eps)[:, None], project(state.x + threat.eps)[:, None]
    windows = _Windows(state.x, sides, level, draws[..., 0], draws[..., 1])
    raised = draws[..., 5:, None, None] >= 0.5

    def propose(at: Tensor) -> Tensor:
        colour = torch.where(raised[at], high, low)
        return torch.where(windows.inside(at), colour, state.point[:, None]).flatten(0, 1)

    return propose


def _tiles(x: Tensor, noise: ImageNoise, threat: ThreatModel) -> Tensor:
    """L2 and L1: about 5 by 5 tiles, each a pile and a hollow of random sign and orientation."""
    rows, channels, height, width = x.shape
    side = max(height // 5, 1)
    margin = (height - 5 * side) // 2 if height >= 5 else 0
    down, across = ((length - margin) // side for length in (height, width))
    signs = noise.signs((channels, down, across), "tiles")
    turned = noise.uniform((1, down, across), "turns") < 0.5
    pile = _pile(side, threat.norm).to(x.device)
    tiles = torch.where(turned[..., None, None], pile, pile.T) * signs[..., None, None]
    tiles = tiles.permute(0, 1, 2, 4, 3, 5).reshape(rows, channels, down * side, across * side)
    bottom, right = height - margin - down * side, width - margin - across * side
    delta = F.pad(tiles, (margin, right, margin, bottom))
    return x + (_stretched(delta, threat) if threat.norm == "L2" else delta)


def _pile_up(state: _State, threat: ThreatModel, sides: tuple[int, ...], level: Tensor, draws: Tensor) -> _Propose:
    """L2 and L1: at each query empty a square; spend its budget, and what is left of eps, in another one.

    The share of each channel follows what it spent in the two squares (Andriushchenko et al. 2020, algorithm 3).
    """
    power, channels = (2 if threat.norm == "L2" else 1), state.x.shape[1]
    to, source = (_Windows(state.x, sides, level, draws[..., i], draws[..., i + 1]) for i in (0, 2))
    piles = _piles(sides, threat.norm, state.x.device)
    signs = torch.where(draws[..., 5:, None, None] < 0.5, -1.0, 1.0)
    turned = draws[..., 4, None, None, None] < 0.5

    def spent(part: Tensor) -> Tensor:  # per channel
        return norm_of(part.flatten(-2), threat)[..., None, None]

    def propose(at: Tensor) -> Tensor:
        delta = (state.point - state.x)[:, None]
        filled, emptied = to.inside(at), source.inside(at)
        pile = to.filled(at, piles, turned[at]) * signs[at]
        old = delta * filled
        fresh = (pile + old / spent(old).clamp_min(1e-12)) * filled
        left = (threat.eps**power - per_image(norm_of(delta.flatten(1), threat), delta) ** power).clamp_min(0)
        budget = left / channels + spent(delta * (filled | emptied)) ** power
        length = budget.sqrt() if power == 2 else budget * channels
        fresh = fresh / spent(fresh).clamp_min(1e-12) * length
        delta = torch.where(filled, fresh, delta.masked_fill(emptied, 0)).flatten(0, 1)
        x = state.x.repeat_interleave(at.shape[1], 0)
        return near(threat, x)(x + (_stretched(delta, threat) if threat.norm == "L2" else delta))

    return propose


def _stretched(delta: Tensor, threat: ThreatModel) -> Tensor:
    return threat.eps * delta / per_image(norm_of(delta.flatten(1), threat).clamp_min(1e-12), delta)


class _Windows:
    """Squares in images of the shape of ``x``, placed by numbers in [0, 1); a square's side is ``sides[level]``."""

    def __init__(self, x: Tensor, sides: tuple[int, ...], level: Tensor, top: Tensor, left: Tensor) -> None:
        self._level = level[:, None, None, None]
        side = torch.tensor(sides, device=x.device)[level]
        offsets, within = [], []
        for length, draw in zip(x.shape[2:], (top, left)):
            # As in the authors' code the last place is left out, unless it is the only one; the paper has it.
            first = (draw * (length - side).clamp_min(1)).long()
            offset = torch.arange(length, device=x.device) - first[:, None]
            offsets.append(torch.minimum(offset.clamp_min(0), side[:, None] - 1))
            within.append((offset >= 0) & (offset < side[:, None]))
        self._row, self._column = offsets[0][:, None, :, None], offsets[1][:, None, None, :]
        self._down, self._across = within[0][:, None, :, None], within[1][:, None, None, :]

    def inside(self, at: Tensor) -> Tensor:
        """Which pixels lie in the squares at some places."""
        return self._down[at] & self._across[at]

    def filled(self, at: Tensor, patterns: Tensor, turned: Tensor) -> Tensor:
        """The level's pattern in each square, transposed in some of them; outside of it anything."""
        level, row, column = self._level[at], self._row[at], self._column[at]
        return torch.where(turned, patterns[level, row, column], patterns[level, column, row])


@lru_cache(maxsize=16)
def _judgements(queries: int, device: torch.device) -> Tensor:
    """For each query the one, not before it, at which points are judged."""
    query = torch.arange(queries + 1, device=device)
    every = torch.where(query <= EARLY, BLOCK, LATER)
    return ((query + every - 1) // every * every).clamp_max(queries)


@lru_cache(maxsize=16)
def _piles(sides: tuple[int, ...], norm: str, device: torch.device) -> Tensor:
    """The piles of some sides, ``(sides, most, most)``; a smaller one lies in the corner."""
    most = max(sides)
    return torch.stack([F.pad(_pile(side, norm), (0, most - side, 0, most - side)) for side in sides]).to(device)


def _pile(side: int, norm: str) -> Tensor:
    """The update of L2 and L1: a pile beside a hollow, each of concentric rectangles, of norm 1 together (eq. 2).

    A pixel at Chebyshev distance D of the centre has height ``Σ_{k >= D} (k + 1)^-2``; the power is -4 for L1.
    """
    order, power = (2, 2) if norm == "L2" else (1, 4)

    def rectangle(height: int, width: int) -> Tensor:
        rings = max(height, width) // 2 + 1
        heights = (torch.arange(1, rings + 1, dtype=torch.float64) ** -power).flip(0).cumsum(0).flip(0)
        from_middle = [(torch.arange(n) - n // 2).abs() for n in (height, width)]
        pile = heights[torch.maximum(from_middle[0][:, None], from_middle[1][None, :])]
        return pile / torch.linalg.vector_norm(pile, order)

    both = torch.cat([rectangle(side // 2, side), -rectangle(side - side // 2, side)])
    return (both / torch.linalg.vector_norm(both, order)).float()


register(
    "square",
    Square,
    options={name: Option(setting=name, parse=int) for name in ("queries", "restarts")},
    summary="random search with squares, without gradients",
    paper="A, C",
)
