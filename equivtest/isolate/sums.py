"""Sources in the sums behind the forward: what a right loop's additions round, and where. Pure.

They are judged where a loop does what the plan says and comparison A's tolerance is too narrow for
its sums all the same: the gradient is that of the replay bit for bit on every rank, from the
candidate's own losses and with the root factors that the plan asks for. What is left between it and
the plan's is rounding of additions, part by part.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import same_values
from equivtest.compare.tolerance import sum_tolerance
from equivtest.distance import MaybeTensors, added, difference, distance, norms, ratio
from equivtest.precision import unit_roundoff


@dataclass(frozen=True)
class SumSource:
    """A source in the sums behind the forward, known as the difference that it makes.

    Attributes:
        cause: the source.
        error: what it adds to the gradient, in float64, by position.
        where: where it enters, in words.
        text: its figures, in a sentence.
    """

    cause: str
    error: MaybeTensors
    where: str
    text: str = ""


@dataclass(frozen=True)
class LoopSums:
    """The sources in one group's sums.

    Attributes:
        sources: those there are.
        allowed: by tensor, the norm that comparison A allows their errors together.
        left: by tensor, the distance over the scale of A with all of them isolated.
    """

    sources: tuple[SumSource, ...]
    allowed: tuple[float, ...]
    left: tuple[float, ...]

    def besides(self, isolated: Collection[str]) -> list[SumSource]:
        """The sources that are not isolated."""
        return [source for source in self.sources if source.cause not in isolated]

    def within(self, isolated: Collection[str]) -> bool:
        """What the others add to the gradient is within comparison A's tolerance."""
        errors = [source.error for source in self.besides(isolated)]
        sizes = norms(added(*errors)) if errors else [0.0] * len(self.allowed)
        return all(size <= most for size, most in zip(sizes, self.allowed, strict=True))


@dataclass(frozen=True)
class Summed:
    """One group's sum as the loop took it, and taken otherwise from the same addends.

    Attributes:
        gradient: the loop's.
        float32: its sum with accumulators of at least float32.
        exact: the exact sum.
        accumulated: the exact average of the replicas' own sums.
        large: the large batch's gradient in the case's precision, where only rounding separates it
            from the sum: no source is in the forward.
        scale: comparison A's, by tensor.
        terms: microbatches.
    """

    gradient: MaybeTensors
    float32: MaybeTensors
    exact: MaybeTensors
    accumulated: MaybeTensors
    large: MaybeTensors | None
    scale: Sequence[float]
    terms: int

    def apart(self, a: MaybeTensors, b: MaybeTensors) -> list[float]:
        """Distance over the scale, by tensor."""
        return [ratio(d, s) for d, s in zip(difference(a, b), self.scale, strict=True)]

    @cached_property
    def accumulation(self) -> list[float]:
        """What the replicas' own sums round."""
        return self.apart(self.accumulated, self.exact)

    @cached_property
    def all_reduce(self) -> list[float]:
        """What their average rounds."""
        return self.apart(self.gradient, self.accumulated)

    def orders(self, names: Sequence[str]) -> str:
        """Accumulation and all-reduce apart, and the shapes of the large batch's kernels."""
        parts = [
            ("accumulation order", self.accumulation),
            ("all-reduce order", self.all_reduce),
        ]
        if self.large is not None:
            parts.append(("kernel shape", self.apart(self.large, self.exact)))
        return ", ".join(f"{name} {worst(away, names)}" for name, away in parts)


def reproduced(gradients: Sequence[MaybeTensors], replay: Replay, D: int) -> bool:
    """The loop does what the plan says, whatever its sums lose: it is acquitted.

    Its gradient is the replay's ``reduced`` to the bit on every rank; where the order of the sum
    over replicas is not known, within what another order of D terms may round.

    Args:
        gradients: by rank.
    """
    if not (replay.shared and replay.weighed):
        return False
    return all(
        same_values(mine, other) or (not replay.exact and _in_another_order(mine, other, scale, D))
        for gradient in gradients
        for mine, other, scale in zip(gradient, replay.reduced, replay.scale, strict=True)
    )


def _in_another_order(mine: Tensor | None, other: Tensor | None, scale: float, D: int) -> bool:
    if mine is None or other is None:
        return False
    return ratio(distance(mine, other), scale) <= sum_tolerance(D, other.dtype)


def in_another_order(gradient: MaybeTensors, replay: Replay, names: Sequence[str]) -> str | None:
    """What to say of a right loop that does not give the bits of an exact replay, or None.

    Args:
        gradient: of any rank.
    """
    if not (replay.exact and replay.shared and replay.weighed):
        return None
    pairs = list(zip(gradient, replay.reduced, replay.scale, strict=True))
    units = [
        0.0
        if mine is None or other is None or same_values(mine, other)
        else ratio(distance(mine, other), scale) / unit_roundoff(other.dtype)
        for mine, other, scale in pairs
    ]
    if not any(units):
        return None
    return (
        f"{sum(u > 0 for u in units)} of {len(units)} gradients are not, to the bit, what "
        "DistributedDataParallel's own sums give here: right, but added or scaled in another "
        f"order; at most {worst(units, names)} roundoffs of their scale"
    )


def worst(found: Sequence[float], names: Sequence[str]) -> str:
    """The largest of distances by tensor, and whose it is."""
    t = max(range(len(found)), key=found.__getitem__)
    return f"{found[t]:.2g}" + (f" ({names[t]!r})" if found[t] else "")
