"""Every pair of faults of different places: nine in ten named both, and never a third."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from meta.pairs import PAIRS, PRECISIONS, named


@pytest.mark.parametrize("precision", PRECISIONS)
def test_both_of_a_pair_are_named_and_no_third(
    precision: str, record_property: Callable[[str, object], None]
) -> None:
    assert len(PAIRS) >= 60
    found = named(PAIRS, precision)
    record_property("pairs", f"{precision}: {found}")
    assert not found.third, "\n".join(found.third)
    assert found.share >= 0.9, f"{found}\n" + "\n".join(found.missed)
