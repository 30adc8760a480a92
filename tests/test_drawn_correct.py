"""A hundred drawn correct loops, and a loss scaled by powers of two; thousands in ``soak``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_correct
from tally import PROPERTY


@pytest.mark.parametrize("stream", range(4))
def test_correct_loops_raise_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=25, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)
