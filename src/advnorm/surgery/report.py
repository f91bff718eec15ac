"""The report of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class SurgeryReport:
    """The modules that a conversion replaced, and those that it kept with the reason."""

    norm: str
    domains: tuple[str, ...]
    replaced: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    parameters_before: int = 0
    parameters_after: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        added = self.parameters_after - self.parameters_before
        width = max((len(name) for name in [*self.replaced, *self.kept]), default=0)
        return "\n".join(
            [
                f"{self.norm}: {len(self.replaced)} replaced, {len(self.kept)} kept; "
                f"domains: {', '.join(self.domains)}; {added:+,} parameters",
                *(f"  {name:<{width}}  {change}" for name, change in self.replaced.items()),
                *(f"  {name:<{width}}  kept: {reason}" for name, reason in self.kept.items()),
                *(f"  note: {note}" for note in self.notes),
            ]
        )
