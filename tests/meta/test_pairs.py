"""Some pairs of faults, of all kinds of places; all of them in ``soak``."""

from __future__ import annotations

import pytest
from meta import composed
from meta.composed import Loop, Planted
from meta.pairs import PAIRS, PLAN, PRECISIONS, Named, Pair, ragged

from equivtest import check
from equivtest.causes import Cause

SOME = (
    Pair(composed.MissingWorldSize, composed.FlagAfterForward),
    Pair(composed.MeanOfMeansBoth, composed.SchedulePerProcess),
    Pair(composed.LocalDenominator, composed.ClipMissing),
    Pair(composed.Miscounted, composed.AverageBeforeUpdate),
    Pair(composed.SummingHook, composed.ClipPerMicrobatch),
    Pair(composed.MissingAccumDivision, composed.DecayPerMicrobatch),
    Pair(composed.CounterFrozen, composed.SchedulePerProcess),
    Pair(composed.OnlyLast, composed.StoppedEarly),
)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loop_of_places_is_right(precision: str) -> None:
    needs = frozenset({"clip", "schedule", "average", "tail"})
    verdict = check(ragged(needs), PLAN, precision=precision, loop=Loop())
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("pair", SOME, ids=lambda pair: pair.name)
def test_both_are_named_and_nothing_else(pair: Pair) -> None:
    for precision in ("fp64", "bf16-mixed"):
        verdict = pair.check(precision)
        assert set(verdict.causes) == pair.causes, verdict.explain()


def test_pairs_are_of_different_places() -> None:
    assert len(PAIRS) >= 60
    assert all(pair.one.place != pair.other.place for pair in PAIRS)
    assert all(pair in PAIRS for pair in SOME)
    planted: set[type[Planted]] = {one for pair in PAIRS for one in (pair.one, pair.other)}
    assert planted == set(composed.FAULTS)


def _named(*causes: Cause) -> Named:
    found = Named()
    verdict = _Told(causes)
    found.add(SOME[0], verdict)  # type: ignore[arg-type]
    return found


class _Told:
    """As much of a verdict as is counted."""

    status = "fault"

    def __init__(self, causes: tuple[Cause, ...]) -> None:
        self.causes = causes


def test_a_third_cause_is_counted_and_a_missing_one() -> None:
    both = (Cause.MISSING_WORLD_SIZE, Cause.FLAG_AFTER_FORWARD)
    assert _named(*both).share == 1.0
    assert len(_named(*both, Cause.ONLY_LAST).third) == 1
    assert (_named(*both, Cause.GRADIENT).left, _named(*both, Cause.GRADIENT).third) == (1, [])
    assert (_named(both[0]).one, _named(both[0]).share) == (1, 0.0)
