"""After each bad input the next case's bits are what they were before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from inputs import GOOD, check, stable

from equivtest import Verdict


@pytest.fixture(scope="session")
def before() -> Verdict:
    verdict = check(GOOD)
    assert verdict.status == "equivalent"
    return stable(verdict)


@pytest.fixture(autouse=True)
def next_case_has_its_bits(before: Verdict) -> Iterator[None]:
    """Rows, events, losses, card and all: the whole verdict but its duration."""
    yield
    assert stable(check(GOOD)) == before
