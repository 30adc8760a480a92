"""Each planted fault is seen in every case in which it changes anything."""

from __future__ import annotations

import pytest
from meta.catalogue import FAULTS, Fault
from meta.tally import faulty


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen(fault: Fault) -> None:
    tally = faulty(fault, 8, quick=True)
    assert tally.share >= fault.seen, f"{fault.name}: {tally}\n" + "\n".join(tally.wrong)
