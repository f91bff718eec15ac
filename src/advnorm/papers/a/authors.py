"""The protocol ``authors``: what the public code of paper A's group does differently from the text.

Not reproduced: Setup1 in that code updates its running statistics twice per step, and Cross-BN divides by the unbiased
deviation without ε and averages deviations instead of variances. Its figures 6 and 7 compare sets of channel values,
which ``set_distances`` of the analyses record beside ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from advnorm.papers.a.trainings import ATTACKS
from advnorm.studies.registry import register_protocol
from advnorm.studies.study import Cell, Measure

#: AutoAttack on the first 1,000 test images there; here 1,000 that are spread evenly over the classes.
AUTOATTACK_IMAGES = 1000


@register_protocol("A", "authors")
def authors(cell: Cell) -> Cell:
    """The training attack starts at ``x + 0.001 · N(0, 1)``; PGD-10 at test time has steps of ε/4; fewer images."""
    config = replace(cell.config, attack=replace(cell.config.attack, start="gaussian"))
    measures = tuple(part for measure in cell.measures for part in _split(measure, cell))
    return replace(cell, config=config, measures=measures)


def _split(measure: Measure, cell: Cell) -> Iterator[Measure]:
    """Split a benchmark in two: AutoAttack on fewer images, then the other attacks on all."""
    if measure.name != "benchmark":
        yield measure
        return
    eps = str(measure.options.get("eps", cell.config.eps))
    quarter = f"pgd10-step{int(eps.split('/')[0]) // 4}"
    attacks = {name: quarter if spec == ATTACKS["pgd10"] else spec for name, spec in measure.options["attacks"].items()}
    some = {name: spec for name, spec in attacks.items() if spec == "autoattack"}
    if some:
        yield replace(measure, options={**measure.options, "attacks": some, "limit": AUTOATTACK_IMAGES})
    yield replace(measure, options={**measure.options, "attacks": {n: s for n, s in attacks.items() if n not in some}})
