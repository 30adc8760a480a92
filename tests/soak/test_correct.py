"""Two thousand drawn correct loops on real process groups: no alarm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_correct
from drawn_table import PROPERTY


@pytest.mark.parametrize("stream", range(100, 108))
def test_correct_loops_raise_no_alarm(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=250, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)
