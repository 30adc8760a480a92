"""Faults of eight families are named beside BatchNorm and dropout, whose shares stay the same."""

from __future__ import annotations

from functools import cache

import pytest
from meta import composed
from meta.beside_sources import beside_sources
from meta.composed import Planted

from equivtest import Verdict

FAULTS = (
    composed.MissingWorldSize,
    composed.FlagAfterForward,
    composed.SummingHook,
    composed.OnlyLast,
    composed.ClipPerMicrobatch,
    composed.ScaleChangesInside,
    composed.SchedulePerProcess,
    composed.CounterFrozen,
    composed.AverageNever,
)
SOURCES = {"source.batchnorm", "source.dropout"}
SAME = 0.05
"""Of shares, which add up to 1: as far as a fault may move them."""


@cache
def _right(precision: str) -> Verdict:
    return beside_sources(None, precision)


def test_the_right_loop_is_explained() -> None:
    verdict = _right("fp64")
    assert (verdict.status, set(verdict.causes)) == ("explained", SOURCES), verdict.explain()
    assert min(verdict.sources.values()) > SAME, "a share could vanish without being missed"


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.cause))
def test_a_fault_is_named_beside_sources(fault: type[Planted], precision: str) -> None:
    verdict = beside_sources(fault, precision)
    assert verdict.status == "fault", verdict.explain()
    assert set(verdict.causes) == {str(fault.cause), *SOURCES}, verdict.explain()
    shares = _right(precision).sources
    assert verdict.sources == pytest.approx(shares, abs=SAME)


def test_they_are_of_eight_families() -> None:
    assert len({str(fault.cause).partition(".")[0] for fault in FAULTS}) >= 8
