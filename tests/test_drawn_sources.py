"""A few drawn cases with sources and, isolating always, without; thousands in ``soak``."""

from __future__ import annotations

from correct import check_correct
from drawn_sources import check_sources


def test_no_source_is_claimed_where_there_is_none() -> None:
    _, wrong = check_correct(examples=15, stream=10, isolate="always")
    assert not wrong, "\n".join(wrong)


def test_planted_sources_are_named_and_no_other() -> None:
    _, wrong = check_sources(examples=15, stream=11)
    assert not wrong, "\n".join(wrong)
