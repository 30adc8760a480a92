"""The weights of one update, and what they have in common."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equivtest.compare import figures

_SIGMAS = 4.0

_UNSURE = 0.25
"""Of a weight: where the gradient leaves more open, a number says nothing."""

_ALIKE = 2e-3
"""Relative: numbers so near are one number to the eye, and for the title."""

_ACCOUNTED = 0.05
"""Part of the largest deviation that a rule may leave where a title says that all follow it."""


@dataclass(frozen=True)
class Weight:
    """The weight of one microbatch, as found beside as planned."""

    replica: int
    microbatch: int
    expected: float
    found: float
    sigma: float
    supervised: float

    @property
    def ratio(self) -> float:
        """1 where it counts as planned; rounding beside 0 is 0."""
        return figures.unrounded(self.found / self.expected if self.expected else 1.0 + self.found)

    @property
    def off(self) -> bool:
        """Beyond what its uncertainty and rounding allow; what is not a number is."""
        return not abs(self.found - self.expected) <= max(
            1e-9 * abs(self.expected), _SIGMAS * self.sigma
        )

    @property
    def look(self) -> tuple[str, bool]:
        """What makes two weights one number to the eye, with the same mark."""
        return f"{self.ratio:.3f}", self.off


def title(weights: Sequence[Weight]) -> str:
    """What the weights of one update have in common; microbatches that hold nothing aside."""
    broken = sum(not math.isfinite(one.found) for one in weights)
    if broken:
        return f"{broken} of {len(weights)} weights are not finite"
    unsure = max(one.sigma / abs(one.expected or 1.0) for one in weights)
    if unsure > _UNSURE:
        return f"weights cannot be told apart here, they are known to ± {unsure:.2g} at best"
    off = [one for one in weights if one.off]
    if not off:
        near = all(abs(one.ratio - 1) <= _ALIKE for one in weights)
        return (
            "every microbatch counts as planned"
            if near
            else "no weight is off by more than its uncertainty"
        )
    holding = [one for one in weights if one.supervised > 0]
    return _shape(holding) or _reach(off, len(weights))


def _shape(weights: Sequence[Weight]) -> str:
    """The rule that all of them follow; empty where there is none."""
    if not any(one.off for one in weights):
        return ""
    mean = sum(one.ratio for one in weights) / len(weights)
    if _follow(weights, [mean] * len(weights)):
        return f"every microbatch counts {_times(mean)} times what it should"
    rows = [[w for w in weights if w.replica == r] for r in {w.replica for w in weights}]
    if _only_last(rows):
        return "only the last microbatch of each replica counts"
    part = sum(one.ratio * one.supervised for one in weights) / len(weights)
    if _follow(weights, [part / one.supervised for one in weights]):
        return "each microbatch contributes the same, whatever it holds"
    return _by_replica(weights, rows)


def _by_replica(weights: Sequence[Weight], rows: Sequence[Sequence[Weight]]) -> str:
    if len(rows) < 2:
        return ""
    held = {row[0].replica: sum(w.supervised for w in row) for row in rows}
    part = sum(w.ratio * w.supervised for w in weights) / len(rows)
    if _follow(weights, [part / held[w.replica] for w in weights]):
        return "each replica contributes the same, whatever it holds"
    means = {row[0].replica: sum(w.ratio for w in row) / len(row) for row in rows}
    several = any(len(row) > 1 for row in rows)
    if several and _follow(weights, [means[w.replica] for w in weights]):
        return "one weight a replica: its microbatches count alike"
    return ""


def _only_last(rows: Iterable[Sequence[Weight]]) -> bool:
    """Of each replica the last one counts, and of some there are others, which count nothing."""
    in_order = [sorted(row, key=lambda one: one.microbatch) for row in rows]
    others = [one for row in in_order for one in row[:-1]]
    last = [row[-1] for row in in_order]
    return (
        bool(others)
        and all(abs(one.ratio) < _ALIKE for one in others)
        and all(abs(one.ratio) >= _ALIKE for one in last)
    )


def _follow(weights: Sequence[Weight], expected: Sequence[float]) -> bool:
    """Whether a rule accounts for what is off, and not only for what is near 1 anyway."""
    largest = max(abs(one.ratio) for one in weights)
    furthest = max(abs(one.ratio - 1) for one in weights)
    allowed = min(_ALIKE * largest, _ACCOUNTED * furthest)
    return all(abs(w.ratio - e) <= allowed for w, e in zip(weights, expected, strict=True))


def _reach(off: Sequence[Weight], count: int) -> str:
    low, high = _times(min(one.ratio for one in off)), _times(max(one.ratio for one in off))
    reach = low if low == high else f"{low} to {high}"
    verb = "counts" if count == 1 else "count"
    of = "the one microbatch" if count == 1 else f"{len(off)} of {count} microbatches"
    return f"{of} {verb} {reach} times what {'it' if count == 1 else 'they'} should"


def _times(ratio: float) -> str:
    """Three digits, and beside 1 as many as tell it from 1."""
    return figures.weight(ratio) if abs(ratio - 1) < 0.02 else f"{ratio:.3g}"
