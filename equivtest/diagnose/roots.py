"""By what a loop weighed each microbatch before its backward, over what the plan asks for.

Where the loop makes its losses as ``Loss`` the root factor was observed. A loop with a loss of its
own starts its backward from a value: over the replay's loss of the same microbatch that is its
factor, to the rounding of a forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from equivtest.arms.replay import Replay
from equivtest.batches import Counts, denominator
from equivtest.compare.tolerance import FORWARD_UNITS
from equivtest.observe.trace import UpdateTrace
from equivtest.precision import Precision

FACTOR = 16.0
"""Roundoffs that an observed factor may be off: a few divisions and products of the loop's own."""

Term = tuple[int, int, str]
"""Replica, microbatch and term of the loss."""


@dataclass(frozen=True)
class Roots:
    """Root factors over the expected ones.

    Attributes:
        found: by replica, microbatch and term; 1 is what the plan asks for.
        tolerance: relative, of each.
        read: ``factors``, ``values`` or ``weights``: where they were read from.
    """

    found: Mapping[Term, float]
    tolerance: float
    read: str

    @property
    def right(self) -> bool:
        """All are what the plan asks for."""
        return all(abs(w - 1.0) <= self.tolerance for w in self.found.values())


def roots(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts, precision: Precision
) -> Roots | None:
    """Read from what was observed; None where neither factors nor values were."""
    D = len(seen)
    found: dict[Term, float] = {}
    for r, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            terms = replay.terms.get((r, k), ())
            for index, term in enumerate(terms):
                if term is None or not replay.counts[r, k][index]:
                    continue
                factor = microbatch.factors[index] if index < len(microbatch.factors) else None
                if factor is None:
                    return _from_values(seen, replay, counts, precision)
                wanted = D / denominator(counts, term) * (microbatch.scale or 1.0)
                found[r, k, term] = factor / wanted
    return Roots(found, FACTOR * replay.factor_u, "factors") if found else None


def _from_values(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts, precision: Precision
) -> Roots | None:
    D = len(seen)
    found: dict[Term, float] = {}
    for r, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            value = expected_value(replay, counts, r, k)
            if not any(replay.counts.get((r, k), ())):
                continue
            alone = [m.backward for m in update.microbatches].count(microbatch.backward) == 1
            if microbatch.root is None or not alone or not value:
                return None
            factor = microbatch.root / (value * D * (microbatch.scale or 1.0))
            if not math.isfinite(factor):
                return None
            for term in replay.terms[r, k]:
                if term is not None:
                    found[r, k, term] = factor
    tolerance = 4 * FORWARD_UNITS * precision.u
    return Roots(found, tolerance, "values") if found else None


def expected_value(replay: Replay, counts: Counts, r: int, k: int) -> float:
    """The microbatch's share of the group's loss, as the replay made it."""
    totals, terms = replay.totals.get((r, k), ()), replay.terms.get((r, k), ())
    return sum(
        total / denominator(counts, term)
        for total, term in zip(totals, terms, strict=True)
        if term is not None
    )


def common_values(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts, precision: Precision
) -> bool:
    """Every backward started from the sum of all replicas' losses of that microbatch.

    On more than one replica, whose own losses differ: a collective that has no gradient makes it.
    """
    D = len(seen)
    if D == 1:
        return False
    found = []
    for update in seen:
        for k, microbatch in enumerate(update.microbatches):
            whole = sum(expected_value(replay, counts, r, k) for r in range(D))
            if microbatch.root is None:
                return False
            value = microbatch.root / (microbatch.scale or 1.0)
            found.append(math.isclose(value, whole, rel_tol=4 * FORWARD_UNITS * precision.u))
    own = {expected_value(replay, counts, r, 0) for r in range(D)}
    return bool(found) and all(found) and len(own) > 1
