"""Tolerances: figures worked by hand from the formulas of the three comparisons."""

import math

import pytest
import torch

from equivtest import Plan
from equivtest.compare.tolerance import floors, oracle_tolerance, replay_tolerance, split_tolerance
from equivtest.precision import precision, unit_roundoff


@pytest.mark.parametrize(
    ("plan", "dtype", "allowed"),
    [
        # 4 sqrt(16) 2^-24 = 2^-20
        (Plan(1, 8, 2), torch.float32, 2.0**-20),
        (Plan(1, 4, 1), torch.float64, 2.0**-50),  # 4 x 2 x 2^-53
        (Plan(4, 1, 1), torch.bfloat16, 2.0**-6),  # 4 x 1 x 2^-8
    ],
)
def test_the_loop_may_be_off_by_the_rounding_of_its_sums(plan, dtype, allowed: float) -> None:
    assert replay_tolerance(plan, dtype, elements=9, scale=1.0) == pytest.approx(allowed, rel=1e-12)


def test_microbatch_size_does_not_loosen_the_comparison_with_the_replay() -> None:
    small, large = (replay_tolerance(Plan(m, 4, 2), torch.float32, 9, 1.0) for m in (1, 64))
    assert small == large


def test_near_zero_float16_rounds_by_an_absolute_amount() -> None:
    # 16 elements each off by up to 2^-25 are sqrt(16) 2^-25 = 2^-23 apart; over a scale of 2^-13
    # that is 2^-10, beside u = 2^-11: 4 x (2^-11 + 2^-10).
    found = replay_tolerance(Plan(1, 1, 1), torch.float16, elements=16, scale=2.0**-13)
    assert found == 4 * (2.0**-11 + 2.0**-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_where_nothing_was_added_nothing_rounds(dtype: torch.dtype) -> None:
    # Then the distance of anything but zeros is infinite, and beyond any finite tolerance.
    found = replay_tolerance(Plan(1, 1, 1), dtype, elements=4, scale=0.0)
    assert found == 4 * unit_roundoff(dtype)


def test_the_split_may_be_off_by_64_floors_of_at_least_four_roundoffs() -> None:
    assert split_tolerance(0.0) == 64 * 4 * 2.0**-53
    assert split_tolerance(1e-12) == 64e-12


@pytest.mark.parametrize(
    ("name", "floor", "allowed"),
    [
        ("fp32", 0.0, 4 * 4 * 2.0**-24),
        ("fp64", 0.0, 4 * 4 * 2.0**-53),
        ("bf16-mixed", 0.0, 4 * 2.0**-8),
        ("fp16-mixed", 0.0, 4 * 2.0**-11),
        ("fp32", 1e-5, 4e-5),
    ],
)
def test_the_arithmetic_may_be_off_by_four_floors(name: str, floor: float, allowed: float) -> None:
    assert oracle_tolerance(precision(name), floor) == pytest.approx(allowed, rel=1e-15)


def test_the_floor_of_a_large_tensor_is_its_largest_distance() -> None:
    assert floors([[1e-7, 3e-7], [2e-7, 1e-7]], [65, 1000]) == [2e-7, 3e-7]


def test_the_floor_of_a_small_tensor_is_at_least_the_median_over_tensors() -> None:
    # Largest by tensor 1, 5, 9: the median is 5. 64 elements are few, 65 are not.
    assert floors([[1.0, 5.0, 9.0]], [64, 1000, 1000]) == [5.0, 5.0, 9.0]
    assert floors([[1.0, 5.0, 9.0]], [65, 1000, 1000]) == [1.0, 5.0, 9.0]


def test_a_run_that_is_not_finite_does_not_raise_the_floor_of_other_tensors() -> None:
    assert floors([[1.0, math.inf, 3.0]], [4, 1000, 1000]) == [3.0, math.inf, 3.0]


def test_without_runs_there_is_no_floor() -> None:
    assert floors([], [4, 4]) == [0.0, 0.0]
