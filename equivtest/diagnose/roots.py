"""By what a loop weighed each microbatch before its backward, over what the plan asks for.

Where the loop makes its losses as ``Loss`` the root factor was observed. A loop with a loss of its
own starts its backward from a value: over the replay's loss of the same microbatch that is its
factor, to the rounding of a forward. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from equivtest.arms.replay import Replay
from equivtest.batches import Counts, denominator
from equivtest.compare.tolerance import FORWARD_UNITS
from equivtest.observe.trace import MicrobatchTrace, UpdateTrace
from equivtest.precision import Precision

FACTOR = 16.0
"""Roundoffs that an observed factor may be off: a few divisions and products of the loop's own."""

VALUE = 4 * FORWARD_UNITS
"""Roundoffs that a value may be off the replay's: those of the forwards that made the two."""

Term = tuple[int, int, str]
"""Replica, microbatch and term of the loss."""


@dataclass(frozen=True)
class Roots:
    """Root factors over the expected ones.

    Attributes:
        found: by replica, microbatch and term; 1 is what the plan asks for.
        tolerance: relative, of each.
        read: where they were read from: ``factors`` and ``values`` were observed, ``weights`` were
            fitted to the gradient.
    """

    found: Mapping[Term, float]
    tolerance: float
    read: Literal["factors", "values", "weights"]

    @property
    def right(self) -> bool:
        """All are what the plan asks for."""
        return all(abs(w - 1.0) <= self.tolerance for w in self.found.values())


def roots(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts, precision: Precision
) -> Roots | None:
    """Read from what was observed; None where neither factors nor values were.

    Args:
        seen: the update by rank.
        counts: supervised elements of the whole group, by term.
    """
    factors = _from_factors(seen, replay, counts)
    if factors is not None:
        return Roots(factors, FACTOR * replay.factor_u, "factors") if factors else None
    values = _from_values(seen, replay, counts)
    return Roots(values, VALUE * precision.u, "values") if values else None


def _from_factors(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts
) -> dict[Term, float] | None:
    """None where the factor of a term that counts was not observed."""
    found: dict[Term, float] = {}
    for r, k, microbatch in _microbatches(seen):
        for index, term in enumerate(replay.terms.get((r, k), ())):
            if term is None or not replay.counts[r, k][index]:
                continue
            factor = microbatch.factors[index] if index < len(microbatch.factors) else None
            if factor is None:
                return None
            wanted = len(seen) / denominator(counts, term) * (microbatch.scale or 1.0)
            found[r, k, term] = factor / wanted
    return found


def _from_values(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Counts
) -> dict[Term, float] | None:
    """None where a microbatch that counts has no backward of its own that started from a number."""
    found: dict[Term, float] = {}
    backwards = [[m.backward for m in update.microbatches] for update in seen]
    for r, k, microbatch in _microbatches(seen):
        if not any(replay.counts.get((r, k), ())):
            continue
        value, wanted = _value(microbatch), len(seen) * expected_value(replay, counts, r, k)
        if value is None or not wanted or backwards[r].count(microbatch.backward) > 1:
            return None
        if not math.isfinite(value / wanted):
            return None
        found |= {(r, k, t): value / wanted for t in replay.terms[r, k] if t is not None}
    return found


def _microbatches(seen: Sequence[UpdateTrace]) -> Iterator[tuple[int, int, MicrobatchTrace]]:
    for r, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            yield r, k, microbatch


def _value(microbatch: MicrobatchTrace) -> float | None:
    """What the backward started from, without the loss scale."""
    return None if microbatch.root is None else microbatch.root / (microbatch.scale or 1.0)


def expected_value(
    replay: Replay, counts: Counts, r: int, k: int, weights: Mapping[Term, float] | None = None
) -> float:
    """The microbatch's share of the group's loss, as the replay made it.

    Args:
        weights: by which the loop weighed its terms.
    """
    totals, terms = replay.totals.get((r, k), ()), replay.terms.get((r, k), ())
    held = weights or {}
    return sum(
        held.get((r, k, term), 1.0) * total / denominator(counts, term)
        for total, term in zip(totals, terms, strict=True)
        if term is not None
    )


def common_values(
    seen: Sequence[UpdateTrace],
    replay: Replay,
    counts: Counts,
    precision: Precision,
    read: Roots,
) -> bool:
    """Every backward started from the sum of all replicas' losses of that microbatch.

    On more than one replica, whose own losses differ: a collective that has no gradient makes it.
    Not where the root factors that were observed give those values as well.
    """
    D, off = len(seen), VALUE * precision.u
    if len({expected_value(replay, counts, r, 0) for r in range(D)}) == 1:
        return False
    weights = read.found if read.read == "factors" else None
    common, own = [], []
    for r, k, microbatch in _microbatches(seen):
        value = _value(microbatch)
        if value is None:
            return False
        whole = sum(expected_value(replay, counts, replica, k) for replica in range(D))
        alone = D * expected_value(replay, counts, r, k, weights)
        common.append(math.isclose(value, whole, rel_tol=off))
        own.append(weights is not None and math.isclose(value, alone, rel_tol=off))
    return bool(common) and all(common) and not all(own)
