"""Sixty drawn correct loops, and a loss scaled by powers of two; thousands in ``soak``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_correct, check_scaled
from drawn_table import PROPERTY


@pytest.mark.parametrize("stream", range(4))
def test_correct_loops_raise_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=15, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stream", range(2))
def test_a_power_of_two_on_the_loss_changes_no_margin(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_scaled(examples=4, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)
