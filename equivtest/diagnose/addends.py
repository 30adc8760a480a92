"""What the loop added up, to the bit, and its sum in a lower dtype as loops take it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.diagnose.path import Place, until_last_backward
from equivtest.distance import MaybeTensors, dense
from equivtest.observe.trace import UpdateTrace
from equivtest.precision import unit_roundoff

LOW = (torch.bfloat16, torch.float16, torch.float32)

Accumulated = Literal["", "added", "cast"]
"""How each replica's own sum is low: not; added into a low sum; the addends cast before that."""

Reduced = Literal["", "divided first", "divided low", "divided after", "divided last"]
"""How the sum over replicas is low: not; where, and in which dtype, it is divided by D."""


@dataclass(frozen=True)
class Way:
    """One way to take the sums in ``dtype``."""

    dtype: torch.dtype
    accumulated: Accumulated = ""
    reduced: Reduced = ""


@dataclass(frozen=True)
class Addends:
    """The microbatches' gradients as the loop's backwards gave them, scaled where the loss was.

    Attributes:
        replay: that kept its microbatches' parts.
        dtypes: of the loop's gradient, by tensor; None where it has none.
        replicas, microbatches: how many there are, of these in each replica.
        weights: how often each counts in its replica's own sum; once where it is not in here.
    """

    replay: Replay
    dtypes: Sequence[torch.dtype | None]
    replicas: int
    microbatches: int
    weights: Mapping[Place, float] = field(default_factory=dict)

    @classmethod
    def of(cls, replay: Replay, like: MaybeTensors) -> Addends | None:
        """None where no real gradient is known.

        Args:
            like: the loop's gradient.
        """
        if not replay.parts or any(g is not None and not g.is_floating_point() for g in like):
            return None
        r, k = max(replay.parts)
        return cls(replay, [None if g is None else g.dtype for g in like], r + 1, k + 1)

    def as_held(self, seen: Sequence[UpdateTrace]) -> Addends:
        """With what clears and clips left of each in ``.grad`` up to the last backward."""
        weights = {
            (r, k): held.get(k, 0.0)
            for r, update in enumerate(seen)
            for held in [_held(update)]
            for k in range(self.microbatches)
        }
        return replace(self, weights={} if set(weights.values()) == {1.0} else weights)

    def ways(self, dtype: torch.dtype) -> Iterator[Way]:
        """Every way that differs from a sum in ``dtype``, the simpler ones first."""
        accumulated: list[Accumulated] = ["", "added", "cast"]
        reduced: list[Reduced] = ["", "divided first", "divided low", "divided after"]
        reduced += ["divided last"]
        for low in LOW:
            if unit_roundoff(low) <= unit_roundoff(dtype):
                continue
            for a, r in sorted(product(accumulated, reduced), key=all):
                if (a or r) and (self.replicas > 1 or not r):
                    yield Way(low, a, r)

    def average(self, t: int) -> Tensor | None:
        """The average over replicas of tensor ``t`` in its own dtype."""
        return self.summed(t, None)[0]

    def summed(self, t: int, way: Way | None) -> list[Tensor | None]:
        """The average of tensor ``t`` taken this way, in the gradient's dtype.

        Over more than two replicas there is one for each rank that an all-reduce's ring may begin
        with: each element's is one of them.
        """
        dtype = self.dtypes[t]
        held = [self._accumulated(r, t, way) for r in range(self.replicas)]
        sums = [one for one in held if one is not None]
        if dtype is None or len(sums) < len(held):
            return [None]
        D = self.replicas
        if way is None or not way.reduced:
            return [torch.stack([s.to(dtype) * (1.0 / D) for s in sums]).sum(0)]
        given = [_given(s, way, D) for s in sums]
        begins = range(D if D > 2 else 1)
        return [_left(_ring(given, begin), way, D, dtype) for begin in begins]

    def _accumulated(self, r: int, t: int, way: Way | None) -> Tensor | None:
        own = [self.own(r, k, t) for k in range(self.microbatches)]
        return _accumulated([g for g in own if g is not None], way)

    def own(self, r: int, k: int, t: int) -> Tensor | None:
        """The microbatch's gradient before the replay put its root factor right."""
        part, dtype = self.replay.parts[r, k][t], self.dtypes[t]
        if part is None or dtype is None:
            return None
        weight = self.weights.get((r, k), 1.0)
        return (dense(part) / self.replay.corrections[r, k] * weight).to(dtype)


def _held(update: UpdateTrace) -> dict[int, float]:
    """Weights of a replica's microbatches by what happened to ``.grad``; unscaling left out."""
    held: dict[int, float] = {}
    for op in until_last_backward(update.operations):
        if op.kind == "backward":
            held |= {k: held.get(k, 0.0) + 1.0 for k in op.microbatches}
        elif op.kind == "zero":
            held = {}
        elif op.kind == "clip":
            held = {k: weight * op.factor for k, weight in held.items()}
    return held


def _accumulated(given: Sequence[Tensor], way: Way | None) -> Tensor | None:
    if not given:
        return None
    if way is None or not way.accumulated:
        total = given[0]
        for g in given[1:]:
            total = total + g
        return total
    total = given[0].to(way.dtype)
    for g in given[1:]:
        if way.accumulated == "added":  # in the wider dtype, and stored in the low one
            total = (total.to(g.dtype) + g).to(way.dtype)
        else:
            total = total + g.to(way.dtype)
    return total


def _given(own: Tensor, way: Way, D: int) -> Tensor:
    """What a replica hands to the reduction."""
    if way.reduced == "divided first":
        return (own / D).to(way.dtype)
    low = own.to(way.dtype)
    return low / D if way.reduced == "divided low" else low


def _ring(given: Sequence[Tensor], begin: int) -> Tensor:
    """gloo's ring adds up one rank after the other, downwards from where a chunk begins."""
    D = len(given)
    total = given[begin]
    for i in range(1, D):
        total = total + given[(begin - i) % D]
    return total


def _left(total: Tensor, way: Way, D: int, full: torch.dtype) -> Tensor:
    """What the loop makes of the reduced sum."""
    if way.reduced == "divided after":
        return (total / D).to(full)
    return total.to(full) / D if way.reduced == "divided last" else total.to(full)


def nearest(given: Tensor, candidates: Sequence[Tensor], alpha: float) -> Tensor:
    """By element the candidate that ``alpha`` brings nearest to ``given``; in float64."""
    best = candidates[0].double() * alpha
    for candidate in candidates[1:]:
        other = candidate.double() * alpha
        best = torch.where((other - given).abs() < (best - given).abs(), other, best)
    return best
