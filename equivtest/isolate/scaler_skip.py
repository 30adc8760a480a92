"""``source.scaler_skip``: an overflow in one arm, where the scaler skips the update.

An arm skips an update where its scaled gradient is not finite. Two arms of which one skips are
apart by the whole update, a relative squared distance of 1 for each tensor of the optimizer. Impose
the decision of one on the other and nothing is left: both stay where they were, or both move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from equivtest.arms.extremes import reached, reached_by_large
from equivtest.arms.oracle import Whole
from equivtest.arms.replay import Replay, Start
from equivtest.causes import Cause
from equivtest.compare.tables import SourceRow
from equivtest.compare.verdict import Finding
from equivtest.distance import finite
from equivtest.isolate.explained import Explained
from equivtest.isolate.skip.overflow import (
    Overflow,
    entered,
    first_microbatch,
    in_a_sum,
    largest_of,
)
from equivtest.isolate.skip.prose import explain
from equivtest.isolate.skip.skip import Skip, attempt
from equivtest.observe.trace import MicrobatchTrace, OptimizerTrace, Trace, UpdateTrace
from equivtest.plan import GroupLayout
from equivtest.precision import Precision

NEAR = 16.0
"""How far below the largest number the large batch's gradient may be and still be run to see
whether it overflows. Only sums over examples are larger in it than in a microbatch, and they are
its gradient, but for a parameter that is used several times and whose parts cancel."""


@dataclass(frozen=True)
class Arms:
    """The arms of one update, run as far as is asked for.

    Attributes:
        names: of the gradients, by position.
        replay: of the plan's microbatches ``seen``.
        large: the large batch, its loss times this factor; ``oracle``, the same in float64.
    """

    names: Sequence[str]
    precision: Precision
    group: GroupLayout
    start: Start
    seen: Sequence[Sequence[MicrobatchTrace]]
    loss_scale: float
    replay: Replay
    large: Callable[[float], Whole]
    oracle: Callable[[], Whole]

    @property
    def _both(self) -> tuple[Whole, Whole]:
        return self.large(1.0), self.oracle()

    def odd_in_large(self, own: Collection[str], factor: float = 1.0) -> list[str]:
        """Parameters of ``own`` whose gradient in the large batch is not finite."""
        right = finite(self.large(factor).gradients)
        return [n for n, r in zip(self.names, right, strict=True) if n in own and not r]

    def overflow(self, own: Collection[str]) -> Overflow:
        """Where the split overflows."""
        first = first_microbatch(self.replay, self.names, own)
        if first is None:
            return in_a_sum(self.replay, self.names, own)
        place, tensor, several = first
        found = reached(self._both, self.group, self.start, self.seen, self.loss_scale, place)
        rank, microbatch = place
        return replace(
            entered(found, own, tensor, self.precision),
            rank=rank,
            microbatch=microbatch,
            microbatches=several,
        )

    def overflow_of_large(self, own: Collection[str], tensor: str) -> Overflow:
        """Where the large batch overflows, in ``tensor`` among others."""
        found = reached_by_large(self._both, self.loss_scale)
        return entered(found, own, tensor, self.precision)

    def near(self, own: Collection[str]) -> bool:
        """The large batch may overflow: the gradient that it adds up is near the largest number."""
        limit = largest_of(self.precision.autocast or self.precision.parameters)
        sizes = (
            float(gradient.abs().max()) * self.loss_scale
            for name, gradient in zip(self.names, self.replay.expected, strict=True)
            if name in own and gradient is not None and gradient.numel() > 0
        )
        return any(size * NEAR > limit for size in sizes)


def detect(
    arms: Arms,
    history: Sequence[UpdateTrace],
    skipped: Sequence[OptimizerTrace],
    applied: Sequence[OptimizerTrace],
) -> list[Skip]:
    """The skips of the last update of ``history`` in either arm.

    Args:
        history: a rank's updates.
        skipped: the optimizers that the candidate skipped, because they overflow.
        applied: those that it applied.
    """
    found = [_skipped(arms, history, optimizer) for optimizer in skipped]
    large = [_applied(arms, history, optimizer) for optimizer in applied]
    return found + [skip for skip in large if skip is not None]


def _skipped(arms: Arms, history: Sequence[UpdateTrace], optimizer: OptimizerTrace) -> Skip:
    own = optimizer.names
    D = len(arms.group.ids)
    large = bool(arms.odd_in_large(own))
    decides = not large and D > 1 and bool(arms.odd_in_large(own, D))
    return Skip(
        update=len(history) - 1,
        optimizer=optimizer,
        overflow=arms.overflow(own),
        split=True,
        large=large,
        D=D if decides else 1,
        attempt=attempt(history, own),
        weighed=arms.replay.weighed,
    )


def _applied(arms: Arms, history: Sequence[UpdateTrace], optimizer: OptimizerTrace) -> Skip | None:
    own = optimizer.names
    if history[-1].scale is None or not arms.near(own):
        return None
    odd = arms.odd_in_large(own)
    if not odd:
        return None
    return Skip(
        update=len(history) - 1,
        optimizer=optimizer,
        overflow=arms.overflow_of_large(own, odd[0]),
        split=False,
        large=True,
        D=1,
        attempt=attempt(history, own),
    )


def explained(skips: Sequence[Skip], trace: Trace, isolate: str) -> Explained | None:
    """What the source has of the distance between the arms of an update, where a skip makes one."""
    apart = [skip for skip in skips if _cause(skip, trace, isolate)]
    if not apart:
        return None
    where = "; ".join(str(skip.overflow) for skip in apart)
    squared = sum(skip.squared_distance(imposed=False) for skip in apart)
    left = sum(skip.squared_distance(imposed=True) for skip in apart)
    return Explained(
        update=apart[0].update,
        squared=squared,
        rows=(SourceRow(str(Cause.SCALER_SKIP), 1.0 - left / squared, where, claimed=True),),
        remainder=left / squared,
        diverges=True,
        within=True,
        reruns=len(apart),
    )


def told(
    skips: Sequence[Skip], trace: Trace, unit: str | None, isolate: str
) -> tuple[list[Finding], list[str]]:
    """Findings on the skips of one arm alone, and notes on those of both.

    Args:
        trace: of the rank that saw them.
        unit: in which the experiment's schedule counts; None where it has none.
        isolate: what the case isolates.
    """
    findings = [
        Finding(
            _cause(skip, trace, isolate),
            explain(skip, trace, unit),
            update=skip.update,
            rank=skip.overflow.rank,
            tensor=skip.overflow.tensor,
            distance=1.0,
            tolerance=0.0,
        )
        for skip in skips
        if skip.split != skip.large
    ]
    return findings, [explain(skip, trace, unit) for skip in skips if skip.split == skip.large]


def _cause(skip: Skip, trace: Trace, isolate: str) -> str:
    """The source, or nothing where it is not isolated or the loop may be what overflows.

    A factor that is not the plan's may be put right before the update or be a fault: the gradient
    of an update that was applied tells, and there may be none.
    """
    if skip.split == skip.large or isolate == "never":
        return ""
    known = skip.weighed or any(
        o.applied and o.names == skip.optimizer.names
        for update in trace.updates
        for o in update.optimizers
    )
    return str(Cause.SCALER_SKIP) if known else ""
