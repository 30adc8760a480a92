"""An overflow in one arm or in both: where it is, when it came, and what the skip did."""

from __future__ import annotations

from isolate.placements import named, placements


def test_rank_microbatch_and_tensor_of_an_overflow_are_named() -> None:
    wrong = [text for placement in placements(8, seed=0) for text in named(placement)]
    assert not wrong, "\n".join(wrong)
