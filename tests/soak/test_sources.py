"""No source claimed in 2,000 drawn cases without one, none missed in 500 with one to three."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from correct import check_correct
from drawn_sources import check_sources
from drawn_table import PROPERTY


@pytest.mark.parametrize("stream", range(200, 208))
def test_no_source_is_claimed_where_there_is_none(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_correct(examples=250, stream=stream, isolate="always")
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stream", range(300, 304))
def test_planted_sources_are_named_and_no_other(
    stream: int, record_property: Callable[[str, object], None]
) -> None:
    tally, wrong = check_sources(examples=125, stream=stream)
    record_property(PROPERTY, tally.text())
    assert not wrong, "\n".join(wrong)
