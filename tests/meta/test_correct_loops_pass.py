"""Loops that are right in another way than the recipe are called equivalent."""

from __future__ import annotations

import pytest
from meta.correct_loops import CORRECT, Correct
from meta.tally import correct


@pytest.mark.parametrize("loop", CORRECT, ids=lambda loop: loop.name)
def test_a_correct_loop_is_equivalent(loop: Correct) -> None:
    tally = correct(loop, 2, quick=True)
    assert not tally.wrong, f"{loop.name}: {tally}\n" + "\n".join(tally.wrong)
