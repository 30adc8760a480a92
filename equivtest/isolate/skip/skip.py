"""An update that overflows in an arm: which arm, where, and when in the life of the loss scale."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equivtest.isolate.skip.overflow import Overflow
from equivtest.observe.trace import OptimizerTrace, UpdateTrace


class Attempt(StrEnum):
    """When an update overflows, in the life of the loss scale."""

    FIRST = "first attempt"
    GROWTH = "later growth"
    HELD = "a scale that held before"


@dataclass(frozen=True)
class Skip:
    """An update that overflows in an arm, for one optimizer.

    Attributes:
        update: its number.
        optimizer: as the candidate's first rank saw it.
        overflow: of the split, or of the large batch where that alone overflows.
        split, large: the arm skips.
        D: replicas, where the large batch would skip too if its loss had the factor ``D`` that the
            loop's has; 1 elsewhere.
        attempt: when it came.
        weighed: the loop's factors on its losses are the plan's.
    """

    update: int
    optimizer: OptimizerTrace
    overflow: Overflow
    split: bool
    large: bool
    D: int
    attempt: Attempt
    weighed: bool = True

    def squared_distance(self, *, imposed: bool) -> float:
        """Between the arms' updates, relative to their size: an update that is missing is 1 away.

        Args:
            imposed: the decision of one arm is imposed on the other.
        """
        return 0.0 if imposed or self.split == self.large else 1.0


def attempt(history: Sequence[UpdateTrace], own: Collection[str]) -> Attempt:
    """When the last update of ``history`` overflows, from the scales of those applied before."""
    held = [
        update.scale or 1.0
        for update in history[:-1]
        if any(o.applied and o.names == own for o in update.optimizers)
    ]
    if not held:
        return Attempt.FIRST
    return Attempt.GROWTH if max(held) < (history[-1].scale or 1.0) else Attempt.HELD
