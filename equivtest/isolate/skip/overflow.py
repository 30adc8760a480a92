"""Where a scaled gradient stops being finite: rank, microbatch, tensor and point."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from equivtest.arms.extremes import GRADIENT_AT, GRADIENT_OF, Extreme, Extremes
from equivtest.arms.replay import Replay
from equivtest.distance import finite
from equivtest.precision import Precision


@dataclass(frozen=True)
class Overflow:
    """Where a gradient stops being finite.

    Attributes:
        tensor: the first parameter, in the order of the backward, whose gradient is not finite.
        where: the first point of forward, backward or sum that is not finite, in words.
        dtype: that cannot hold what is there, without ``torch.``.
        largest: magnitude there in float64, not finite where the experiment itself is not; None
            where it was not measured.
        rank, microbatch: of the plan; None for the large batch, and for a sum over them.
        microbatches: how many of the group overflow.
    """

    tensor: str
    where: str
    dtype: str
    largest: float | None = None
    rank: int | None = None
    microbatch: int | None = None
    microbatches: int = 0

    @property
    def limit(self) -> float:
        """The largest number of the dtype."""
        return largest_of(getattr(torch, self.dtype))

    def __str__(self) -> str:
        at = [f"rank {self.rank}"] if self.rank is not None else []
        at += [f"microbatch {self.microbatch}"] if self.microbatch is not None else []
        size = f"{self.where} overflows {self.dtype}"
        if self.largest is not None and math.isfinite(self.largest):
            size = f"{self.where} reaches {self.largest:.4g}, {self.dtype} holds {self.limit:.5g}"
        elif self.largest is not None:
            size = f"{self.where} is not finite, in float64 neither"
        named = self.tensor in self.where
        tensor = "" if named else f" (and with it the gradient of {self.tensor!r})"
        more = f"; {self.microbatches} microbatches overflow" if self.microbatches > 1 else ""
        return f"{', '.join(at)}{': ' if at else ''}{size}{tensor}{more}"


def first_microbatch(
    replay: Replay, names: Sequence[str], own: Collection[str]
) -> tuple[tuple[int, int], str, int] | None:
    """Replica and microbatch that overflow first, in which tensor of ``own``; how many do."""
    found = {}
    for (r, k), norms in replay.added.items():
        odd = [n for n, x in zip(names, norms, strict=True) if n in own and not math.isfinite(x)]
        if odd:
            found[k, r] = odd[0]
    if not found:
        return None
    k, r = min(found)
    return (r, k), found[k, r], len(found)


def in_a_sum(replay: Replay, names: Sequence[str], own: Collection[str]) -> Overflow:
    """The overflow of what adds up gradients that are finite in every microbatch."""
    right = finite(replay.reduced)
    t = next(t for t, name in enumerate(names) if name in own and not right[t])
    held = replay.reduced[t]
    assert held is not None, "no gradient is a finite one"
    return Overflow(
        tensor=names[t],
        where="the sum over replicas"
        if replay.overflowing is None
        else "the sum over its microbatches",
        dtype=str(held.dtype).removeprefix("torch."),
        rank=replay.overflowing,
    )


def entered(
    extremes: Extremes, own: Collection[str], tensor: str, precision: Precision
) -> Overflow:
    """The first point that is not finite though it is in float64, and the first parameter.

    A mask may hold infinities by intent: those are in float64 as well.

    Args:
        tensor: one of ``own`` whose gradient is not finite, where no hook sees one.
    """
    low, exact = extremes
    sizes: dict[tuple[str, str, int], float] = {}
    for point in exact:
        sizes[point.point] = max(point.largest, sizes.get(point.point, 0.0))
    beyond = [point for point in low if not point.finite]
    overflowed = [p for p in beyond if math.isfinite(sizes.get(p.point, math.nan))]
    backward = [p for p in beyond if p.kind in (GRADIENT_AT, GRADIENT_OF)]
    reached = [p.name for p in backward if p.kind == GRADIENT_OF and p.name in own]
    tensor = reached[0] if reached else tensor
    at = [*overflowed, *backward, Extreme(GRADIENT_OF, tensor, "", 0, "float32", math.inf)][0]
    size = sizes.get(at.point)
    return Overflow(tensor, _in_words(at), _too_small(at.dtype, size, precision), size)


def largest_of(dtype: torch.dtype) -> float:
    """The largest number of a floating dtype."""
    return float(torch.finfo(dtype).max)


def _too_small(seen: str, size: float | None, precision: Precision) -> str:
    """The dtype that could not hold it: a parameter's gradient is cast after it has overflowed."""
    low = precision.autocast or precision.parameters
    beyond_both = size is not None and size > largest_of(getattr(torch, seen))
    return seen if beyond_both else str(low).removeprefix("torch.")


def _in_words(point: Extreme) -> str:
    if point.kind == GRADIENT_OF:
        return f"the gradient of {point.name!r}"
    module = f"`{point.name}` ({point.of})" if point.name else f"the model ({point.of})"
    return f"the {'gradient at the ' if point.kind == GRADIENT_AT else ''}output of {module}"
