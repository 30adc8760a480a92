"""The rank, the microbatch and the tensor of an overflow are named, wherever it is planted."""

from __future__ import annotations

import pytest
from isolate.placements import named, placements


@pytest.mark.parametrize("seed", range(1, 5))
def test_every_one_of_fifty_placements_is_named(seed: int) -> None:
    wrong = [text for placement in placements(50, seed) for text in named(placement)]
    assert not wrong, "\n".join(wrong)
