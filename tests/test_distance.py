"""Norms and distances: float64 throughout, and nothing not comparable passes for equal."""

import math

import pytest
import torch

from equivtest.distance import (
    accumulate,
    difference,
    distance,
    farthest,
    finite,
    norm,
    ratio,
)

inf, nan = math.inf, math.nan


def test_a_norm_is_euclidean_over_all_axes() -> None:
    assert norm(torch.tensor([[3.0, 0.0], [0.0, 4.0]])) == 5.0


def test_a_norm_does_not_overflow_in_the_tensors_own_dtype() -> None:
    # 60000^2 is beyond float16's 65504; the norm of four is 120000.
    assert norm(torch.full((4,), 60000.0).half()) == pytest.approx(120000.0, rel=1e-3)


def test_small_differences_survive_in_float64() -> None:
    # 1 + 2^-23 is float32's next number; in float32 the norm of a difference keeps it, a difference
    # of norms would not.
    a = torch.tensor([1.0, 1.0])
    b = torch.tensor([1.0, 1.0 + 2.0**-23])
    assert distance(b, a) == 2.0**-23


def test_a_low_precision_tensor_is_widened_before_it_is_compared() -> None:
    # 0.1 in bfloat16 is 0.10009765625.
    a, b = torch.tensor([0.1]).bfloat16(), torch.tensor([0.1], dtype=torch.float64)
    assert distance(a, b) == pytest.approx(0.10009765625 - 0.1, rel=1e-12)
    assert distance(b, a) == distance(a, b)


def test_none_is_at_the_distance_of_the_other_tensors_norm() -> None:
    assert distance(None, torch.tensor([3.0, 4.0])) == 5.0
    assert distance(torch.tensor([3.0, 4.0]), None) == 5.0
    assert distance(None, None) == 0.0


@pytest.mark.parametrize("odd", [nan, inf, -inf])
def test_what_is_not_finite_is_infinitely_far_even_from_itself(odd: float) -> None:
    a = torch.tensor([1.0, odd])
    assert distance(a, torch.zeros(2)) == inf
    assert distance(a, a.clone()) == inf
    assert distance(None, a) == inf


def test_another_shape_is_infinitely_far() -> None:
    assert distance(torch.zeros(2, 1), torch.zeros(1, 2)) == inf
    assert distance(torch.zeros(1), torch.zeros(())) == inf


def test_a_sparse_tensor_is_its_dense_twin() -> None:
    dense = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    assert norm(dense.to_sparse()) == 5.0
    assert distance(dense.to_sparse(), dense) == 0.0
    assert distance(dense, (2 * dense).to_sparse()) == 5.0


def test_a_sparse_tensor_with_repeated_entries_is_their_sum() -> None:
    where, what = torch.tensor([[1, 1]]), torch.tensor([3.0, 4.0])
    twice = torch.sparse_coo_tensor(where, what, (3,), check_invariants=True)
    assert norm(twice) == 7.0


def test_a_complex_number_is_measured_by_its_modulus() -> None:
    assert norm(torch.tensor([3 + 4j])) == 5.0
    assert distance(torch.tensor([1 + 1j]), torch.tensor([1 - 2j])) == 3.0


def test_a_counter_is_measured_as_a_number() -> None:
    assert norm(torch.tensor(3)) == 3.0
    assert distance(torch.tensor(5), torch.tensor(3)) == 2.0
    assert distance(torch.tensor(True), torch.tensor(False)) == 1.0


def test_an_empty_tensor_has_no_norm() -> None:
    assert norm(torch.zeros(0, 3)) == 0.0
    assert norm(None) == 0.0


def test_nothing_over_nothing_is_no_distance_and_something_over_nothing_is_all() -> None:
    assert ratio(0.0, 0.0) == 0.0
    assert ratio(1e-300, 0.0) == inf
    assert ratio(1.0, 4.0) == 0.25


def test_differences_are_by_position() -> None:
    a = [torch.tensor([1.0]), None, torch.tensor([2.0])]
    assert difference(a, [torch.tensor([0.0]), None, None]) == [1.0, 0.0, 2.0]


def test_lists_of_other_lengths_are_never_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        difference([None], [None, None])


def test_sums_are_kept_in_float64_whatever_is_added() -> None:
    # bfloat16 has no 257: 256 + 1 stays 256 there.
    total = [None, None]
    for value in (256.0, 1.0):
        accumulate(total, [torch.tensor([value]).bfloat16(), None])
    assert total[0].dtype is torch.float64
    assert total[0].item() == 257.0
    assert total[1] is None


def test_what_is_added_keeps_its_value_when_the_sum_goes_on() -> None:
    part = torch.tensor([1.0], dtype=torch.float64)
    total = [None]
    accumulate(total, [part])
    accumulate(total, [part], weight=2.0)
    assert total[0].item() == 3.0
    assert part.item() == 1.0


def test_finite_means_every_element_of_every_tensor() -> None:
    held = [torch.ones(2), None, torch.tensor([1.0, nan]), torch.tensor([inf])]
    assert finite(held) == [True, True, False, False]


def test_the_farthest_of_several() -> None:
    zero, one, two = (torch.full((4,), v) for v in (0.0, 1.0, 2.0))
    # |(1, 1, 1, 1)| = 2 and |(2, 2, 2, 2)| = 4; None is zero.
    assert farthest([[one, one], [two, None]], [zero, zero]) == [4.0, 2.0]
    assert farthest([[one], [one]], [None]) == [2.0]
