"""Microbatches are found in the large batch wherever they lie, by what they hold by themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivtest.isolate.cut.parts import find

SIZES = [2, 1, 3]
N = sum(SIZES)


def example(i: int, places: int) -> Tensor:
    """Shape (places, 2): no two entries of any examples are alike."""
    return torch.arange(2.0 * places).reshape(places, 2) + 100.0 * i


def group(first: int, size: int, places: int) -> list[Tensor]:
    return [example(i, places) for i in range(first, first + size)]


FOLDED = {
    "major": torch.cat,
    "minor": lambda parts: torch.stack(parts, 1).flatten(0, 1),
    "last axis": lambda parts: torch.stack(parts, 2),
}


@pytest.mark.parametrize("fold", FOLDED)
@pytest.mark.parametrize("places", [1, 4, N])  # six positions of six examples: no size tells them
def test_the_layout_is_told_by_values(fold: str, places: int) -> None:
    whole = FOLDED[fold](group(0, N, places))
    firsts = [0, 2, 3]
    own = [FOLDED[fold](group(a, n, places)) for a, n in zip(firsts, SIZES, strict=True)]
    parts = find(whole, own, SIZES)
    assert parts is not None
    cut = parts.cut(whole)
    assert all(torch.equal(a, b) for a, b in zip(cut, own, strict=True))
    assert torch.equal(parts.joined(cut), whole)


@pytest.mark.parametrize("fold", ["major", "minor"])
def test_a_microbatch_padded_less_than_the_whole_is_found(fold: str) -> None:
    whole = FOLDED[fold](group(0, N, 5))
    # By themselves the first two microbatches are padded to three and four positions.
    lengths = [3, 4, 5]
    firsts = [0, 2, 3]
    own = [
        FOLDED[fold]([e[:length] for e in group(a, n, 5)])
        for a, n, length in zip(firsts, SIZES, lengths, strict=True)
    ]
    parts = find(whole, own, SIZES)
    assert parts is not None
    expected = [FOLDED[fold](group(a, n, 5)) for a, n in zip(firsts, SIZES, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(parts.cut(whole), expected, strict=True))


def test_examples_of_unequal_rows_lie_one_after_the_other() -> None:
    rows = [1, 3, 2, 2, 1, 3]  # 12 rows of six examples: two each would divide as well
    whole = torch.cat([example(i, r) for i, r in enumerate(rows)])
    own = [whole[:4], whole[4:6], whole[6:]]
    parts = find(whole, own, SIZES)
    assert parts is not None
    assert [len(index) for index in parts.indices] == [4, 2, 6]
    assert all(torch.equal(a, b) for a, b in zip(parts.cut(whole), own, strict=True))


def test_what_holds_no_examples_is_not_cut() -> None:
    whole = torch.zeros(5, 2)
    assert find(whole, [torch.zeros(5, 2)] * 3, SIZES) is None
    assert find(whole, [torch.zeros(5, 2, 1)] * 3, SIZES) is None
