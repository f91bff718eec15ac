"""Square Attack: random search with squares, without gradients.

Sources: Andriushchenko et al. 2020, "Square Attack: a query-efficient black-box adversarial attack via random search"
(Linf, L2); Croce & Hein 2021, "Mind the box" (L1).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from advnorm._core.errors import ConfigError
from advnorm._core.seeding import ImageNoise
from advnorm.attacks.base import Option, register
from advnorm.attacks.search import Found, Grid, Search, Victim, margin_of, near, norm_of, take
from advnorm.threat import ThreatModel, per_image

#: Queries after which the share of the pixels that a square covers halves (Andriushchenko et al. 2020, section 5).
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
#: Random numbers are drawn for so many queries at a time.
BLOCK = 25
#: Candidates are judged after each of the first blocks, and then after every fourth: few fall so late.
EARLY, LATER = 8, 4


@dataclass(frozen=True, kw_only=True)
class Square(Search):
    """Random search on the margin ``z_y - max_{j≠y} z_j``: a changed square stays where the margin falls.

    ``p_init``: share of the pixels that the first squares cover; it halves after 10, 50, 200, 500, 1000, ... queries.
    """

    queries: int = 5000
    p_init: float = 0.8
    restarts: int = 1

    def problems(self) -> list[str]:
        problems = super().problems() + self.counted("queries", "restarts")
        if not 0 < self.p_init <= 1:
            problems.append(f"p_init must lie in (0, 1], got {self.p_init!r}")
        return problems

    def variants(self, classes: int) -> int:
        return self.restarts

    def forwards(self, classes: int) -> int:
        return (self.queries + 2) * self.restarts

    def search(self, victim: Victim, x: Tensor, y: Tensor, noise: ImageNoise) -> Found:
        if x.dim() != 4:
            raise ConfigError(f"Square needs images of shape (N, channels, height, width), got {tuple(x.shape)}")
        grid = Grid(victim, self.threat, x, y, self.restarts)
        x, y = grid.rows(x), grid.rows(y)
        margin = margin_of(victim.strict(x), y)
        never = torch.full_like(margin, torch.inf)
        state = _State(x=x, y=y, noise=grid.noise(noise), point=x, margin=margin, shown=never)
        state = self._settled(grid, state)
        if not len(state.y):
            return grid.finish()
        linf = self.threat.norm == "Linf"
        state.point = near(self.threat, state.x)((_stripes if linf else _tiles)(state, self.threat))
        state.margin = margin_of(victim.logits(state.point), state.y)
        state.shown = torch.full_like(state.margin, torch.inf)
        propose = _recolour if linf else _pile_up
        for block in range(math.ceil(self.queries / BLOCK)):
            if block < EARLY or block % LATER == 0:
                state = self._settled(grid, state)
                if not len(state.y):
                    break
            queries = range(block * BLOCK, min((block + 1) * BLOCK, self.queries))
            sides = [self._side(query, *x.shape[2:]) for query in queries]
            draws = state.noise.uniform((BLOCK, 5 + x.shape[1]), block)[:, : len(sides)]
            for proposal in propose(state, self.threat, sides, draws):
                margin = margin_of(victim.logits(proposal), state.y)
                better = margin < state.margin
                state.point = torch.where(per_image(better, proposal), proposal, state.point)
                state.margin = torch.where(better, margin, state.margin)
        self._show(grid, state)
        return grid.finish()

    @staticmethod
    def _show(grid: Grid, state: _State) -> None:
        """Show the points that moved: what the grid has judged already need not be judged again."""
        grid.see(state.point, state.margin.masked_fill(state.margin >= state.shown, torch.inf))
        state.shown = state.margin

    def _settled(self, grid: Grid, state: _State) -> _State:
        self._show(grid, state)
        kept = grid.settle()
        return state if kept is None else take(state, kept)

    def _side(self, query: int, height: int, width: int) -> int:
        """Side of the square at a query: ``sqrt(p h w)``; for L2 and L1 odd and at least 3."""
        p = self.p_init / 2 ** bisect_left(HALVINGS, query)
        side = max(round(math.sqrt(p * height * width)), 1)
        if self.threat.norm != "Linf":
            side = max(side, 3) // 2 * 2 + 1
        return min(side, height, width)


@dataclass
class _State:
    x: Tensor
    y: Tensor
    noise: ImageNoise
    point: Tensor
    margin: Tensor
    shown: Tensor  # the margin when the grid last saw the point


def _stripes(state: _State, threat: ThreatModel) -> Tensor:
    """Linf: vertical stripes of ±eps."""
    _, channels, _, width = state.x.shape
    return state.x + threat.eps * state.noise.signs((channels, 1, width), "stripes")


def _recolour(state: _State, threat: ThreatModel, sides: list[int], draws: Tensor) -> Iterator[Tensor]:
    """Linf: in turn for each query a square of ±eps, of one colour."""
    project = near(threat, state.x)
    low, high = project(state.x - threat.eps), project(state.x + threat.eps)
    windows = _Windows(state.x, sides, draws[..., 0], draws[..., 1])
    raised = draws[..., 5:, None, None] >= 0.5
    for query in range(len(sides)):
        yield torch.where(windows.inside(query), torch.where(raised[:, query], high, low), state.point)


def _tiles(state: _State, threat: ThreatModel) -> Tensor:
    """L2 and L1: about 5 by 5 tiles, each a pile and a hollow of random sign and orientation."""
    rows, channels, height, width = state.x.shape
    side = max(height // 5, 1)
    margin = (height - 5 * side) // 2 if height >= 5 else 0
    down, across = ((length - margin) // side for length in (height, width))
    signs = state.noise.signs((channels, down, across), "tiles")
    turned = state.noise.uniform((1, down, across), "turns") < 0.5
    pile = _pile(side, threat.norm, state.x.device)
    tiles = torch.where(turned[..., None, None], pile, pile.T) * signs[..., None, None]
    tiles = tiles.permute(0, 1, 2, 4, 3, 5).reshape(rows, channels, down * side, across * side)
    bottom, right = height - margin - down * side, width - margin - across * side
    delta = F.pad(tiles, (margin, right, margin, bottom))
    return state.x + (_stretched(delta, threat) if threat.norm == "L2" else delta)


def _pile_up(state: _State, threat: ThreatModel, sides: list[int], draws: Tensor) -> Iterator[Tensor]:
    """L2 and L1: in turn for each query empty a square; spend its budget, and what is left of eps, in another one.

    The share of each channel follows what it spent in the two squares (Andriushchenko et al. 2020, algorithm 3).
    """
    power, channels = (2 if threat.norm == "L2" else 1), state.x.shape[1]
    project = near(threat, state.x)
    to, source = (_Windows(state.x, sides, draws[..., i], draws[..., i + 1]) for i in (0, 2))
    signs = torch.where(draws[..., 5:, None, None] < 0.5, -1.0, 1.0)
    turned = draws[..., 4, None, None, None] < 0.5

    def spent(part: Tensor) -> Tensor:  # per channel
        return norm_of(part.flatten(2), threat)[..., None, None]

    for query, side in enumerate(sides):
        delta = state.point - state.x
        filled, emptied = to.inside(query), source.inside(query)
        pile = to.filled(query, _pile(side, threat.norm, state.x.device), turned[:, query]) * signs[:, query]
        old = delta * filled
        fresh = (pile + old / spent(old).clamp_min(1e-12)) * filled
        left = (threat.eps**power - per_image(norm_of(delta.flatten(1), threat), delta) ** power).clamp_min(0)
        budget = left / channels + spent(delta * (filled | emptied)) ** power
        length = budget.sqrt() if power == 2 else budget * channels
        fresh = fresh / spent(fresh).clamp_min(1e-12) * length
        delta = torch.where(filled, fresh, delta.masked_fill(emptied, 0))
        yield project(state.x + (_stretched(delta, threat) if threat.norm == "L2" else delta))


def _stretched(delta: Tensor, threat: ThreatModel) -> Tensor:
    return threat.eps * delta / per_image(norm_of(delta.flatten(1), threat).clamp_min(1e-12), delta)


class _Windows:
    """For some queries a square in each image, placed by numbers in [0, 1) of shape ``(images, queries)``."""

    def __init__(self, x: Tensor, sides: list[int], top: Tensor, left: Tensor) -> None:
        side = torch.tensor(sides, device=x.device)
        offsets, within = [], []
        for length, draw in zip(x.shape[2:], (top, left)):
            # As in the authors' code the last place is left out, unless it is the only one; the paper has it.
            first = (draw * (length - side).clamp_min(1)).long()
            offset = torch.arange(length, device=x.device) - first[..., None]
            offsets.append(torch.minimum(offset.clamp_min(0), side[:, None] - 1))
            within.append((offset >= 0) & (offset < side[:, None]))
        self._row, self._column = offsets[0][:, :, None, :, None], offsets[1][:, :, None, None, :]
        self._within = within[0][:, :, None, :, None], within[1][:, :, None, None, :]

    def inside(self, query: int) -> Tensor:
        """Which pixels lie in the square."""
        down, across = self._within
        return down[:, query] & across[:, query]

    def filled(self, query: int, pattern: Tensor, turned: Tensor) -> Tensor:
        """The pattern in the square, transposed in some of the images; outside of it anything."""
        row, column = self._row[:, query], self._column[:, query]
        return torch.where(turned, pattern[row, column], pattern[column, row])


@lru_cache(maxsize=256)
def _pile(side: int, norm: str, device: torch.device) -> Tensor:
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
    return (both / torch.linalg.vector_norm(both, order)).float().to(device)


register(
    "square",
    Square,
    options={name: Option(setting=name, parse=int) for name in ("queries", "restarts")},
    summary="random search with squares, without gradients",
    paper="A, C",
)
