"""Normalisations as people write them: the weight that each gives a microbatch. Pure.

A loop sums the losses of a microbatch, divides by something and lets the wrapper average over the
replicas. Over what the plan asks for, ``D / N`` of the sum, that is the microbatch's weight: 1 is
right. ``N`` are the supervised elements of the group, ``n`` those of a microbatch, ``M`` and ``m``
the same of examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from equivtest.causes import Cause

ByMicrobatch = Sequence[Sequence[float]]
"""By replica and microbatch."""


@dataclass(frozen=True)
class Setting:
    """One group: what its microbatches count, in one term of the loss.

    Attributes:
        supervised: elements of each microbatch.
        examples: of each microbatch.
        full: microbatches of a replica in a full group.
        others: counts that a loop may take for the supervised elements, by their name in words.
    """

    supervised: ByMicrobatch
    examples: Sequence[Sequence[int]]
    full: int
    others: Mapping[str, ByMicrobatch] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        """D."""
        return len(self.supervised)

    @property
    def accumulations(self) -> int:
        """A, of this group."""
        return len(self.supervised[0])


@dataclass(frozen=True)
class Reading:
    """One way to read weights: the causes that together give them.

    Attributes:
        weight: of a microbatch (replica, number) in a group; NaN where that divides by zero.
        says: what the loop does, in words.
    """

    causes: frozenset[Cause]
    weight: Callable[[Setting, int, int], float]
    says: str


RELATIVE = frozenset(
    {
        Cause.MEAN_OF_MEANS_ACCUM,
        Cause.MEAN_OF_MEANS_BOTH,
        Cause.LOCAL_DENOMINATOR_DP,
        Cause.WEIGHT_DENOMINATOR_MISMATCH,
        Cause.PARTIAL_DIVISOR,
    }
)
"""Causes that weigh microbatches, or updates, unlike each other."""

SCALARS = frozenset({Cause.DOUBLE_ACCUM_DIVISION, Cause.MISSING_WORLD_SIZE})
"""Two causes that are told together although neither is relative: 1/(A D) is theirs alone."""

Form = Callable[[Setting, ByMicrobatch, int, int], float]
"""A microbatch's weight where the loop takes these counts for the supervised elements."""

Scalar = Callable[[Setting], float]
"""A factor on every microbatch of a group."""


def _total(counts: ByMicrobatch) -> float:
    return sum(map(sum, counts))


def _over(a: float, b: float) -> float:
    return a / b if b else math.nan


def _group(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(_total(s.supervised), _total(c))


def _means(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(_total(s.supervised), s.replicas * s.accumulations * c[r][k])


def _means_in_replica(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(sum(c[r]), s.accumulations * c[r][k])


def _means_across(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(_total(s.supervised), s.accumulations * sum(own[k] for own in c))


def _local(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(_total(s.supervised), s.replicas * sum(c[r]))


def _summed_means(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _over(_total(s.supervised), s.replicas * c[r][k])


def _by_examples(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    examples = _total(s.examples)
    return _over(_total(s.supervised) * s.examples[r][k], c[r][k] * examples)


def _undivided(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return _total(s.supervised) / s.replicas


def _by_batch(s: Setting, c: ByMicrobatch, r: int, k: int) -> float:
    return float(s.examples[r][k] * s.replicas)


def readings(settings: Sequence[Setting]) -> list[Reading]:
    """All readings for groups of one case, those with the fewest causes first.

    Args:
        settings: one or more, with as many replicas and the same ``others`` by name.
    """
    D, A = settings[0].replicas, max(s.accumulations for s in settings)
    found = [
        Reading(
            frozenset(cause for cause in (own, miscounted, *scaled) if cause is not None),
            _times(form, name, factor),
            _words(says, name, word),
        )
        for (own, form, says), (miscounted, name), (scaled, factor, word) in product(
            _forms(settings, D, A), _counts(settings), _scalars(settings, D, A)
        )
        if not (name and form in (_undivided, _by_batch))
    ]
    return sorted(filter(_telling, found), key=lambda one: len(one.causes))


def _telling(reading: Reading) -> bool:
    """Two causes or more are told from relative weights: any number is a product of others."""
    named = reading.causes
    return len(named) < 2 or bool(named & RELATIVE) or named == SCALARS


def _times(form: Form, name: str, factor: Scalar) -> Callable[[Setting, int, int], float]:
    def weight(s: Setting, r: int, k: int) -> float:
        return form(s, s.others[name] if name else s.supervised, r, k) * factor(s)

    return weight


def _words(says: str, name: str, scalar: str) -> str:
    counted = says.replace("count", f"count of {name}") if name else says
    return f"{counted}{scalar}"


def _forms(settings: Sequence[Setting], D: int, A: int) -> Iterator[tuple[Cause | None, Form, str]]:
    yield None, _group, "divides by the group's count"
    if D == 1 and A > 1:
        says = "averages the microbatches' means, each over its own count"
        yield Cause.MEAN_OF_MEANS_ACCUM, _means, says
    if D > 1 and A > 1:
        says = "averages the means of all microbatches, each over its count"
        yield Cause.MEAN_OF_MEANS_BOTH, _means, says
        says = (
            "averages the microbatches' means in each replica, and weighs replicas by their count"
        )
        yield Cause.MEAN_OF_MEANS_ACCUM, _means_in_replica, says
        says = "averages the means over accumulations, each over its own count of all replicas"
        yield Cause.MEAN_OF_MEANS_ACCUM, _means_across, says
    if D > 1:
        yield Cause.LOCAL_DENOMINATOR_DP, _local, "divides by each replica's own count"
    if A > 1:
        says = "adds up the microbatches' means, each over its own count"
        yield Cause.MISSING_ACCUM_DIVISION, _summed_means, says
    says = "weighs means over their own count by shares of examples"
    yield Cause.WEIGHT_DENOMINATOR_MISMATCH, _by_examples, says
    yield Cause.MISSING_DIVISION, _undivided, "divides by no count at all"
    if any(m > 1 for s in settings for replica in s.examples for m in replica):
        says = "divides by the group's count, and multiplies by m and D"
        yield Cause.SUM_CONVENTION, _by_batch, says


def _counts(settings: Sequence[Setting]) -> Iterator[tuple[Cause | None, str]]:
    yield None, ""
    for name in settings[0].others:
        yield Cause.MISCOUNTED, name


def _scalars(
    settings: Sequence[Setting], D: int, A: int
) -> Iterator[tuple[tuple[Cause, ...], Scalar, str]]:
    by_A = ", and by the number of accumulations once more"
    yield (), lambda s: 1.0, ""
    if D > 1:
        yield (Cause.MISSING_WORLD_SIZE,), lambda s: 1.0 / s.replicas, ", and by D once more"
        yield (Cause.SUM_CONVENTION,), lambda s: float(s.replicas), ", and multiplies by D"
    if A > 1:
        yield (Cause.DOUBLE_ACCUM_DIVISION,), lambda s: 1.0 / s.accumulations, by_A
        word = ", and never by the number of accumulations"
        yield (Cause.MISSING_ACCUM_DIVISION,), lambda s: float(s.accumulations), word
    if A > 1 and D > 1:
        both = (Cause.MISSING_WORLD_SIZE, Cause.DOUBLE_ACCUM_DIVISION)
        word = f"{by_A}, and by D once more"
        yield both, lambda s: 1.0 / (s.accumulations * s.replicas), word
    if any(s.accumulations != s.full for s in settings):
        word = ", with the number of accumulations of a full group"
        yield (Cause.PARTIAL_DIVISOR,), lambda s: s.accumulations / s.full, word
