"""Split a batch into segments of samples that use the same banks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from advnorm._core.errors import RouteError
from advnorm.norms.plan import Plan
from advnorm.norms.state import ScopeState


class Segment(NamedTuple):
    """Consecutive rows of a batch that use the same banks."""

    normalized_by: str
    feeds: str  # empty: the samples update no bank
    affine: str
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class Span(NamedTuple):
    """Neighbouring segments that update one bank, normalized together."""

    feeds: str
    segments: tuple[Segment, ...]

    @property
    def rows(self) -> int:
        return self.segments[-1].stop - self.segments[0].start


def split_batch(plan: Plan, state: ScopeState, batch: int, needs_route: bool) -> tuple[Segment, ...]:
    """Split a batch of ``batch`` samples by the plan and the open scopes; neighbours with equal banks are merged."""
    if batch == 0:
        raise RouteError("empty", "the batch is empty", hint="skip empty batches before the forward")
    if state.pair is not None:
        statistics, affine = (plan.domains.index(domain) for domain in state.pair)
        bank = plan.feeds[statistics] if plan.feeds else ""
        return (Segment(bank, bank, plan.affine[affine], 0, batch),)
    if plan.mixture and state.component is not None:
        index = plan.domains.index(state.component)
        return (Segment(plan.normalized_by[index], plan.feeds[index], plan.affine[index], 0, batch),)
    route = state.route
    if route is None:
        if needs_route:
            raise _missing_route(plan)
        route = ((plan.domains[0], None),)
    segments: list[Segment] = []
    start = 0
    for position, (domain, count) in enumerate((*state.forwarded, *route)):
        stop = max(start, batch) if count is None else start + count
        forwarded = position < len(state.forwarded)
        banks = plan.banks(domain, forwarded=forwarded, with_forwarded=bool(state.forwarded))
        segment = Segment(*banks, start, stop)
        # With groups, every domain's samples are grouped on their own, so neighbours stay apart.
        if segments and segments[-1][:3] == segment[:3] and state.groups == 1:
            segments[-1] = segments[-1]._replace(stop=stop)
        elif stop > start:
            segments.append(segment)
        start = stop
    if start != batch:
        forwarded = f" with forwarded {dict(state.forwarded)}" if state.forwarded else ""
        message = f"the route {dict(route)}{forwarded} covers {start} samples and the batch has {batch}"
        hint = "give one count per domain that sum to the batch size, in the order of the concatenation"
        raise RouteError("wrong_route", message, field="route", hint=hint)
    return tuple(segments)


def _missing_route(plan: Plan) -> RouteError:
    last = plan.domains[-1]
    return RouteError(
        "missing_route",
        f"{plan.name} has the domains {', '.join(plan.domains)} and no route is set",
        field="route",
        hint=f"wrap the forward in `with advnorm.route(model, '{last}'):` for a batch of one domain, or in "
        f"`with advnorm.route(model, {plan.example_route}):` for a concatenated one; attacks, evaluations and "
        f"analyses take route='{last}'. In the backward of gradient checkpointing: advnorm.checkpoint_context",
    )


def find_spans(segments: Sequence[Segment]) -> list[Span]:
    """Group segments by the bank they update.

    Empty if another bank normalizes a segment, or if the samples of a bank are not consecutive.
    """
    spans: list[Span] = []
    for segment in segments:
        if segment.normalized_by != segment.feeds:
            return []
        if spans and spans[-1].feeds == segment.feeds:
            spans[-1] = Span(segment.feeds, (*spans[-1].segments, segment))
        else:
            spans.append(Span(segment.feeds, (segment,)))
    return spans if len({span.feeds for span in spans}) == len(spans) else []


def are_equal(spans: Sequence[Span]) -> bool:
    """Whether all spans have the same number of segments, and all segments the same number of rows."""
    return len({len(span.segments) for span in spans}) == len({s.rows for span in spans for s in span.segments}) == 1


Part = TypeVar("Part", Segment, Span)


def map_parts(x: Tensor, parts: Sequence[Part], function: Callable[[Tensor, Part], Tensor]) -> Tensor:
    """Apply ``function`` to the rows of each segment or span and concatenate the results."""
    if len(parts) == 1:
        return function(x, parts[0])
    return concatenate([function(rows, part) for rows, part in zip(x.split([part.rows for part in parts]), parts)])


def concatenate(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate along the batch; a single piece is returned without a copy."""
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
