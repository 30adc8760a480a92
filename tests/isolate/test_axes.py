"""The batch axis is the one that grows with the number of examples."""

from __future__ import annotations

import pytest
import torch

from equivtest.isolate.cut.axes import Layout, fits, joined, layout, rows


@pytest.mark.parametrize(
    ("shapes", "found"),
    [
        (((2, 5), (3, 5), (4, 5)), Layout((0,))),
        (((5, 2), (5, 3), (5, 4)), Layout((1,))),
        (((2, 2), (3, 3), (4, 4)), Layout((0, 1))),  # pairs of examples
        (((6, 5), (9, 5), (12, 5)), Layout((0,))),  # three rows for each
        (((4, 5), (4, 5), (4, 5)), Layout()),  # 4 divides by 2: no evidence
        (((), (), ()), Layout()),
        (((3, 5), (4, 5), (5, 5)), Layout(known=False)),  # a row more than there are examples
        (((5,), (3, 5), (4, 5)), Layout(known=False)),
        (((1,), (3,), (6,)), Layout(known=False)),  # pairs i < j
    ],
)
def test_layout_by_what_grows(shapes: tuple[tuple[int, ...], ...], found: Layout) -> None:
    assert layout(shapes) == found


def test_rows_of_examples_in_a_row() -> None:
    tokens = torch.arange(6)  # two of each of three examples
    assert rows(tokens, Layout((0,)), 3, 1, 2).tolist() == [2, 3]


def test_rows_of_interleaved_examples() -> None:
    tokens = torch.arange(6)  # positions of three examples, position after position
    assert rows(tokens, Layout((0,), minor=True), 3, 1, 2).tolist() == [1, 4]


def test_rows_of_pairs_are_the_pairs_among_them() -> None:
    assert rows(torch.arange(9).view(3, 3), Layout((0, 1)), 3, 1, 3).tolist() == [[4, 5], [7, 8]]


@pytest.mark.parametrize("minor", [False, True])
def test_joined_is_the_other_way_round(minor: bool) -> None:
    tensor, where = torch.arange(24).view(2, 12), Layout((1,), minor=minor)
    parts = [rows(tensor, where, 4, 0, 1), rows(tensor, where, 4, 1, 4)]
    assert torch.equal(joined(parts, where, (1, 3)), tensor)


def test_what_does_not_divide_does_not_fit() -> None:
    assert fits(torch.zeros(6), Layout((0,)), 3)
    assert not fits(torch.zeros(7), Layout((0,)), 3)
    assert not fits(torch.zeros(6), Layout(known=False), 3)
