"""What operations leave in ``.grad``, in the numbers of the fault catalogue's probe T."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from diagnose.operations import COLLECTIVE, REDUCE, an_update, backward, times, zero

from equivtest.diagnose.path import in_turn, paths, until_last_backward
from equivtest.observe.trace import GradientOperation, MicrobatchTrace

COUNTS = ((1, 3, 2), (2, 6, 1))
"""Supervised elements of T by replica and microbatch; right are the same in units of 1/15."""


def held(*operations: Sequence[GradientOperation], name: str = "w") -> list[list[float]] | None:
    """By rank, what T's w holds: replica 0's microbatches, then replica 1's."""
    found = paths([an_update(own) for own in operations], [name])[name]
    if found is None:
        return None
    return [
        [n * mine.get((r, k), 0.0) for r, own in enumerate(COUNTS) for k, n in enumerate(own)]
        for mine in found
    ]


def alike(operations: Sequence[GradientOperation]) -> list[list[float]] | None:
    return held(operations, operations)


def test_one_reduction_with_the_last_backward_is_right() -> None:
    right = [1, 3, 2, 2, 6, 1]
    assert alike([backward(0), backward(1), backward(2), REDUCE]) == [right, right]


def test_every_backward_reduced_is_right_as_well() -> None:
    """What was averaged already is the same on all replicas, and its average is itself."""
    each = [op for k in range(3) for op in (backward(k), REDUCE)]
    assert alike(each) == [[1, 3, 2, 2, 6, 1]] * 2


def test_reduced_with_the_first_backward_only() -> None:
    """sync.inverted_boundary: w r0=(1,6,4|2,0,0), r1=(1,0,0|2,12,2)."""
    inverted = [backward(0), REDUCE, backward(1), backward(2)]
    assert alike(inverted) == [[1, 6, 4, 2, 0, 0], [1, 0, 0, 2, 12, 2]]


def test_never_reduced() -> None:
    """sync.never: w r0=(2,6,4|0,0,0)."""
    assert alike([backward(0), backward(1), backward(2)]) == [
        [2, 6, 4, 0, 0, 0],
        [0, 0, 0, 4, 12, 2],
    ]


def test_cleared_before_each_backward() -> None:
    """accum.only_last: w=(0,0,2|0,0,1)."""
    cleared = [zero(0), backward(0), zero(1), backward(1), zero(2), backward(2), REDUCE]
    assert alike(cleared) == [[0, 0, 2, 0, 0, 1]] * 2


def test_a_sum_by_hand_is_d_times_the_average() -> None:
    """hook.missing_division gives 1.6 for 0.8: D = 2 times."""
    assert alike([backward(0), backward(1), backward(2), COLLECTIVE]) == [[2, 6, 4, 4, 12, 2]] * 2


def test_a_clip_before_the_reduction_counts_and_the_updates_own_does_not() -> None:
    ranks = [
        [backward(0), times("clip", factor), REDUCE, times("clip", 0.1)] for factor in (0.5, 1.0)
    ]
    assert held(*ranks) == [[0.5, 0, 0, 2, 0, 0]] * 2


def test_what_happens_to_another_parameter_is_no_matter() -> None:
    other = GradientOperation("zero", 1, parameters=frozenset({"v"}))
    operations = [backward(0), other, backward(1), backward(2), REDUCE]
    assert alike(operations) == [[1, 3, 2, 2, 6, 1]] * 2
    assert held(operations, operations, name="v") == [[0, 3, 2, 0, 6, 1]] * 2


@pytest.mark.parametrize("unscaled", [True, False], ids=["unscaled", "skipped"])
def test_a_loss_scale_is_taken_out_once(unscaled: bool) -> None:
    """By the unscale that was seen, or where none was by its number."""
    microbatches = [MicrobatchTrace(None, scale=8.0)]
    operations = [backward(0), *([times("unscale", 1 / 8)] if unscaled else [])]
    (mine,) = paths([an_update(operations, microbatches, scale=8.0)], ["w"])["w"] or ()
    assert mine == {(0, 0): 1.0}


def test_ranks_that_wait_for_each_other_in_vain_hold_nothing_known() -> None:
    assert held([backward(0), REDUCE], [backward(0)]) is None
    assert held([backward(0), REDUCE], [backward(0), COLLECTIVE]) is None


def test_nothing_is_known_where_nothing_was_seen() -> None:
    assert held([], []) is None


def test_ranks_come_in_turn_up_to_what_they_do_together() -> None:
    one, two = backward(0), backward(1)
    assert in_turn([[one, REDUCE, two], [one, two, REDUCE]]) == [
        (0, one),
        (1, one),
        (1, two),
        (None, REDUCE),
        (0, two),
    ]


def test_a_clip_or_a_zero_after_the_last_backward_is_the_updates_own() -> None:
    unscale = times("unscale", 0.5)
    operations = [backward(0), times("clip", 0.5), REDUCE, times("clip", 0.1), unscale, zero(1)]
    assert until_last_backward(operations) == [*operations[:3], unscale]
