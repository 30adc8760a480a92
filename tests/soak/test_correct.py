"""Five thousand drawn correct loops on real process groups: no alarm.

Each test is a part of 250, which ``make soak PYTEST_ARGS="-k 'correct and 403'"`` runs alone: a run
that was cut off goes on with the parts that it did not reach.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_correct
from drawn_table import PROPERTY
from meta.tally import correct_in_any_way

PART = 250
RECIPE = range(100, 108)
ANY_WAY = range(400, 412)


@pytest.mark.parametrize("stream", RECIPE)
def test_the_recipe_raises_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=PART, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stream", ANY_WAY)
def test_a_loop_that_is_right_in_another_way_raises_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally = correct_in_any_way(PART, stream)
    record_property("correct", str(tally))
    assert not tally.wrong, "\n".join(tally.wrong)


def test_they_are_five_thousand() -> None:
    assert PART * (len(RECIPE) + len(ANY_WAY)) == 5000
