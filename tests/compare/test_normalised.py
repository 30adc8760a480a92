"""What a loop divides by, read from factors: D = 2, A = 2, counts 1, 3 | 2, 6, N = 12."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from equivtest.compare.normalised import PLANNED, normalisation
from equivtest.observe.trace import MicrobatchTrace, State, UpdateTrace

COUNTS = ((1.0, 3.0), (2.0, 6.0))
NOTHING = State({}, {})


def update(factors: list[float | None], scale: float | None = None) -> UpdateTrace:
    microbatches = tuple(
        MicrobatchTrace((0,), factors=(None if f is None else f * (scale or 1.0),), scale=scale)
        for f in factors
    )
    return UpdateTrace(microbatches, NOTHING, {}, {}, {}, {}, NOTHING, {}, (), applied=True)


def said(factor: Callable[[int, int], float | None], scale: float | None = None) -> str:
    seen = [update([factor(r, k) for k in range(2)], scale) for r in range(2)]
    return normalisation(seen, [[{"": n} for n in replica] for replica in COUNTS])


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (lambda r, k: 2 / 12, "its sum x D / the group's count"),
        (lambda r, k: 1 / 12, "its sum / the group's count"),
        (lambda r, k: 1 / sum(COUNTS[r]), "its sum / the replica's count"),
        (lambda r, k: 1 / COUNTS[r][k], "its sum / its own count"),
        (lambda r, k: 1 / COUNTS[r][k] / 2, "its sum / its own count / A"),
        (lambda r, k: 1.0, "divided by nothing"),
        (lambda r, k: 0.3, "its sum x 0.3"),
        (lambda r, k: 0.1 + 0.1 * k, "its sum x 0.1 to 0.2"),
    ],
)
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_a_reading_is_said_in_words(
    factor: Callable[[int, int], float], words: str, scale: float | None
) -> None:
    told = said(factor, scale)
    assert f"is {words}" in told or words in told
    assert "the group's count is 12" in told


def test_what_was_not_observed_is_the_plans() -> None:
    assert said(lambda r, k: None) == f"not observed; {PLANNED}"
    terms = [[{"a": 1.0, "b": 2.0}]]
    assert PLANNED in normalisation([update([1.0])], terms)
