"""Each planted fault is seen in every precision in which it changes anything."""

from __future__ import annotations

from dataclasses import replace

import pytest
from meta.catalogue import FAULTS, Fault
from meta.tally import faulty


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_seen(fault: Fault) -> None:
    """In one drawn case of each precision; hundreds of cases in ``soak``."""
    for precision in fault.precisions:
        name = f"{fault.name} in {precision}"  # of which come the draws
        tally = faulty(replace(fault, name=name, precisions=(precision,)), 1, quick=True)
        assert not tally.wrong, f"{name}: {tally}\n" + "\n".join(tally.wrong)
