"""Right loops with a cost or a log that is off: a note says so, and nothing else is said."""

from __future__ import annotations

import pytest
from meta import composed
from meta.composed import NOTED, Planted
from meta.pairs import PLAN, Pair, ragged

from equivtest import check
from equivtest.causes import Cause


def noted(notes: tuple[str, ...]) -> set[str]:
    """Causes that notes begin with."""
    return {str(cause) for cause in Cause if any(note.startswith(f"{cause}: ") for note in notes)}


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
@pytest.mark.parametrize("kind", NOTED, ids=lambda kind: str(kind.cause))
def test_a_note_is_the_only_thing_said(kind: type[Planted], precision: str) -> None:
    verdict = check(ragged(), PLAN, precision=precision, loop=kind())
    assert (verdict.status, verdict.causes) == ("equivalent", ()), verdict.explain()
    assert noted(verdict.notes) == {str(kind.cause)}, verdict.notes


@pytest.mark.parametrize("kind", NOTED, ids=lambda kind: str(kind.cause))
def test_a_fault_is_named_beside_a_note(kind: type[Planted]) -> None:
    # Not of the gradient: beside a wrong one no logged loss is judged.
    verdict = Pair(composed.CounterFrozen, kind).check("fp64")
    assert set(verdict.causes) == {"opt.counter_frozen"}, verdict.explain()
    assert noted(verdict.notes) == {str(kind.cause)}, verdict.notes
