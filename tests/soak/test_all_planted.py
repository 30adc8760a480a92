"""Five hundred drawn cases of each planted fault, and of each correct loop of another kind."""

from __future__ import annotations

import pytest
from meta.catalogue import FAULTS, MEASURED, Fault
from meta.correct_loops import CORRECT, Correct
from meta.tally import correct, faulty, unharmed

CASES = 500


def _name(kind: Fault | Correct) -> str:
    return kind.name


@pytest.mark.parametrize("fault", [*FAULTS, *MEASURED], ids=_name)
def test_a_planted_fault_is_seen(fault: Fault, record_property) -> None:  # type: ignore[no-untyped-def]
    tally = faulty(fault, CASES, quick=True)
    record_property("planted", f"{fault.name}: {tally}")
    assert tally.share >= fault.seen, f"{fault.name}: {tally}\n" + "\n".join(tally.wrong)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.right], ids=_name)
def test_a_fault_that_changes_nothing_is_no_fault(fault: Fault) -> None:
    tally = unharmed(fault, CASES, quick=True)
    assert not tally.wrong, f"{fault.name}: {tally}\n" + "\n".join(tally.wrong)


@pytest.mark.parametrize("loop", CORRECT, ids=_name)
def test_a_correct_loop_is_equivalent(loop: Correct) -> None:
    tally = correct(loop, CASES, quick=True)
    assert not tally.wrong, f"{loop.name}: {tally}\n" + "\n".join(tally.wrong)
