"""Square Attack: random search with squares, without gradients.

Sources: Andriushchenko et al. 2020, "Square Attack: a query-efficient black-box adversarial attack via random search"
(Linf, L2); Croce & Hein 2021, "Mind the box" (L1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import Description, Problem, raise_problems
from advnorm._core.seeding import ImageNoise
from advnorm._core.settings import Setting
from advnorm.attacks.base import Restarts
from advnorm.attacks.geometry import fast_projection, threat_norm
from advnorm.attacks.losses import label_margin
from advnorm.attacks.names import count_options, register_attack
from advnorm.attacks.search import CandidateGrid, Search, SearchResult, select_rows
from advnorm.attacks.victim import VictimModel
from advnorm.threat import ThreatModel, per_image

#: Queries after which the share of the pixels that a square covers halves (Andriushchenko et al. 2020, section 5).
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
#: Number of queries for which random numbers are drawn at a time.
BLOCK = 25
#: Points are verified after every block up to query EARLY, then every LATER queries: few images fall that late.
EARLY, LATER = 8 * BLOCK, 4 * BLOCK
#: On a GPU a forward costs at least as much as IDLE rows, and more than ROWS rows do not increase the throughput.
IDLE, ROWS = 64, 1024
#: Approximate share of proposals that improve the best point, from the 10th query to the last.
BETTER = 0.04
#: Steps of several queries between two verifications.
STEPS = 10

Queries = Annotated[int, Setting("Number of queries per image.", "[1, inf)")]


@register_attack(
    "square", options=count_options("queries", "restarts"), summary="random search without gradients", paper="A, C"
)
@dataclass(frozen=True, kw_only=True)
class Square(Search):
    """Random search on the margin ``z_y - max_{j≠y} z_j``: a changed square is kept if the margin falls."""

    needs_gradients = False

    queries: Queries = 5000
    p_init: Annotated[float, Setting("Share of the pixels that the first squares cover.", "(0, 1]")] = 0.8
    restarts: Restarts = 1

    def input_problems(self, shape: Sequence[int], classes: int) -> list[Problem]:
        if len(shape) == 3:
            return []
        message = "Square needs {field} of shape (N, channels, height, width)"
        return [Problem(code="wrong_shape", field="images", message=message, got=Description(f"{('N', *shape)}"))]

    def variants(self, classes: int) -> int:
        return self.restarts

    def forwards(self, classes: int) -> int:
        return (self.queries + 2) * self.restarts

    def search(self, victim: VictimModel, x: Tensor, y: Tensor, noise: ImageNoise) -> SearchResult:
        raise_problems(self.input_problems(x.shape[1:], 2), "bad batch")
        grid = CandidateGrid(victim, self.threat, x, y, self.restarts)
        x, y, noise = grid.to_rows(x), grid.to_rows(y), grid.row_noise(noise)
        grid.offer(x, label_margin(victim.strict_logits(x), y))
        kept = grid.verify()
        if kept is not None:
            x, y, noise = select_rows(x, kept), select_rows(y, kept), select_rows(noise, kept)
        if not len(y):
            return grid.finish()
        start = _stripes if self.threat.norm == "Linf" else _tiles
        point = fast_projection(self.threat, x)(start(x, noise, self.threat))
        margin = victim.search_margin(victim.search_logits(point), y)
        never = torch.full_like(margin, torch.inf)
        state = _State(x=x, y=y, noise=noise, point=point, margin=margin, offered=never, query=torch.zeros_like(y))
        state = self._verified(grid, state)
        while len(state.y):
            self._advance(victim, state, self._queries_per_forward(len(state.y), x.device, victim.memory.size))
            state = self._verified(grid, state)
        return grid.finish()

    def _queries_per_forward(self, rows: int, device: torch.device, memory: int | None) -> int:
        """Number of queries of each row in one forward.

        If a share b of the proposals is better, k proposals advance a row by ``(1 - (1 - b)^k) / b`` queries on
        average and cost ``idle + k rows`` rows. The optimum is about ``k = sqrt(2 idle / (b rows))``.
        """
        if device.type == "cpu" or self.statistics != "running":  # batch statistics belong to one query
            return 1
        best = round(math.sqrt(2 * IDLE / (BETTER * rows)))
        return max(1, min(best, min(ROWS, memory or ROWS) // rows))

    def _advance(self, victim: VictimModel, state: _State, k: int) -> None:
        """Take some steps; each evaluates the next k queries of every row in one forward. Rows advance independently.

        All k proposals start from the row's point. The first better one becomes the point, and the queries after it
        are repeated from there, so k changes nothing but the time.
        """
        # With one query per forward all rows reach the next verification together.
        steps = min(BLOCK if k == 1 else STEPS, math.ceil((self.queries - int(state.query.min())) / k))
        propose = self._proposals(state, steps * k)
        row, ahead = (torch.arange(count, device=state.x.device) for count in (len(state.y), k))
        first = (state.query - row * steps * k)[:, None]
        y = state.y.repeat_interleave(k)
        for _ in range(steps):
            query = state.query[:, None] + ahead
            proposals = propose(query - first)
            margin = victim.search_margin(victim.search_logits(proposals), y)
            stop = self._stop(victim, state)
            better = (margin.view(-1, k) < state.margin[:, None]) & (query < stop[:, None])
            first_better = torch.where(better, ahead, k).amin(1)
            some, at = first_better < k, first_better.clamp_max(k - 1)
            chosen = row * k + at
            state.point = torch.where(per_image(some, state.point), proposals.index_select(0, chosen), state.point)
            state.margin = torch.where(some, margin.index_select(0, chosen), state.margin)
            state.query = torch.minimum(state.query + at + 1, stop)

    def _proposals(self, state: _State, count: int) -> _Propose:
        """Proposals for the next ``count`` queries of each row, row by row."""
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

    def _stop(self, victim: VictimModel, state: _State) -> Tensor:
        """The query at which each row waits for verification; the last query if there is nothing to verify.

        So the same points are verified, with the same results, for any number of queries per forward.
        """
        suspect = (state.margin <= victim.tolerance) & (state.margin < state.offered)
        return torch.where(suspect, _verification_queries(self.queries, state.x.device)[state.query], self.queries)

    def _verified(self, grid: CandidateGrid, state: _State) -> _State:
        """Verify the points of waiting rows, an image's rows in turn, and drop finished images."""
        behind = state.query.view(-1, grid.variants).amin(1)
        waiting = (state.query == self._stop(grid.victim, state)) & (state.query == grid.to_rows(behind))
        # The grid verified these points already.
        grid.offer(state.point, state.margin.masked_fill(~waiting | (state.margin >= state.offered), torch.inf))
        state.offered = torch.where(waiting, state.margin, state.offered)
        kept = grid.verify(finished=behind == self.queries)
        return state if kept is None else select_rows(state, kept)

    def _sides(self, height: int, width: int) -> tuple[int, ...]:
        """Sides of the squares before and after each halving: ``sqrt(p h w)``; for L2 and L1 odd and at least 3."""
        shares = (self.p_init / 2**halvings for halvings in range(len(HALVINGS) + 1))
        sides = (max(round(math.sqrt(share * height * width)), 1) for share in shares)
        if self.threat.norm != "Linf":
            sides = (max(side, 3) // 2 * 2 + 1 for side in sides)
        return tuple(min(side, height, width) for side in sides)


#: Proposals ``(rows · k, ...)`` of the queries at positions ``(rows, k)``.
_Propose = Callable[[Tensor], Tensor]


@dataclass
class _State:
    """The state of each row."""

    x: Tensor
    y: Tensor
    noise: ImageNoise
    point: Tensor
    margin: Tensor
    offered: Tensor  # the margin when the point was last offered to the grid
    query: Tensor  # the next query


def _stripes(x: Tensor, noise: ImageNoise, threat: ThreatModel) -> Tensor:
    """Linf: vertical stripes of ±eps."""
    _, channels, _, width = x.shape
    return x + threat.eps * noise.signs((channels, 1, width), "stripes")


def _recolour(state: _State, threat: ThreatModel, sides: tuple[int, ...], level: Tensor, draws: Tensor) -> _Propose:
    """Linf: at each query a square of ±eps, of one colour."""
    project = fast_projection(threat, state.x)
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
    """L2 and L1: at each query empty a square; spend its budget and the unused part of eps in another one.

    Each channel gets the budget that it spent in the two squares (Andriushchenko et al. 2020, algorithm 3).
    """
    power, channels = (2 if threat.norm == "L2" else 1), state.x.shape[1]
    to, source = (_Windows(state.x, sides, level, draws[..., i], draws[..., i + 1]) for i in (0, 2))
    piles = _piles(sides, threat.norm, state.x.device)
    signs = torch.where(draws[..., 5:, None, None] < 0.5, -1.0, 1.0)
    turned = draws[..., 4, None, None, None] < 0.5

    def spent(part: Tensor) -> Tensor:  # per channel
        return threat_norm(part.flatten(-2), threat)[..., None, None]

    def propose(at: Tensor) -> Tensor:
        delta = (state.point - state.x)[:, None]
        filled, emptied = to.inside(at), source.inside(at)
        pile = to.filled(at, piles, turned[at]) * signs[at]
        old = delta * filled
        fresh = (pile + old / spent(old).clamp_min(1e-12)) * filled
        left = (threat.eps**power - per_image(threat_norm(delta.flatten(1), threat), delta) ** power).clamp_min(0)
        budget = left / channels + spent(delta * (filled | emptied)) ** power
        length = budget.sqrt() if power == 2 else budget * channels
        fresh = fresh / spent(fresh).clamp_min(1e-12) * length
        delta = torch.where(filled, fresh, delta.masked_fill(emptied, 0)).flatten(0, 1)
        x = state.x.repeat_interleave(at.shape[1], 0)
        return fast_projection(threat, x)(x + (_stretched(delta, threat) if threat.norm == "L2" else delta))

    return propose


def _stretched(delta: Tensor, threat: ThreatModel) -> Tensor:
    return threat.eps * delta / per_image(threat_norm(delta.flatten(1), threat).clamp_min(1e-12), delta)


class _Windows:
    """Squares in images of the shape of ``x``, placed by numbers in [0, 1); a square's side is ``sides[level]``."""

    def __init__(self, x: Tensor, sides: tuple[int, ...], level: Tensor, top: Tensor, left: Tensor) -> None:
        self._level = level[:, None, None, None]
        side = torch.tensor(sides, device=x.device)[level]
        offsets, within = [], []
        for length, draw in zip(x.shape[2:], (top, left)):
            # As in the authors' code, but not the paper, the last position is left out unless it is the only one.
            first = (draw * (length - side).clamp_min(1)).long()
            offset = torch.arange(length, device=x.device) - first[:, None]
            offsets.append(torch.minimum(offset.clamp_min(0), side[:, None] - 1))
            within.append((offset >= 0) & (offset < side[:, None]))
        self._row, self._column = offsets[0][:, None, :, None], offsets[1][:, None, None, :]
        self._down, self._across = within[0][:, None, :, None], within[1][:, None, None, :]

    def inside(self, at: Tensor) -> Tensor:
        """Whether each pixel lies in the squares at some positions."""
        return self._down[at] & self._across[at]

    def filled(self, at: Tensor, patterns: Tensor, turned: Tensor) -> Tensor:
        """The level's pattern in each square, transposed where ``turned``; arbitrary outside the square."""
        level, row, column = self._level[at], self._row[at], self._column[at]
        return torch.where(turned, patterns[level, row, column], patterns[level, column, row])


@lru_cache(maxsize=16)
def _verification_queries(queries: int, device: torch.device) -> Tensor:
    """For each query the next query at which points are verified."""
    query = torch.arange(queries + 1, device=device)
    every = torch.where(query <= EARLY, BLOCK, LATER)
    return ((query + every - 1) // every * every).clamp_max(queries)


@lru_cache(maxsize=16)
def _piles(sides: tuple[int, ...], norm: str, device: torch.device) -> Tensor:
    """The piles of all sides, ``(sides, most, most)``; smaller ones are padded."""
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
