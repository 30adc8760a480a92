"""Multiples of two gradients that together are a third: in numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from equivtest.diagnose.extras import multiples


def gradient(*values: complex) -> Tensor:
    dtype = torch.complex128 if any(isinstance(v, complex) for v in values) else torch.float64
    return torch.tensor(values, dtype=dtype)


def test_finds_both_numbers() -> None:
    """A third of the plan's and twice what was left over."""
    a, b = gradient(3.0, 0.0, 6.0), gradient(1.0, 1.0, -1.0)
    assert multiples(a / 3 + 2 * b, a, b) == pytest.approx((1 / 3, 2.0))


def test_finds_them_of_complex_gradients() -> None:
    a, b = gradient(1.0 + 1j, 0.0), gradient(0.0, 2.0 - 1j)
    assert multiples(0.5 * a - b, a, b) == pytest.approx((0.5, -1.0))


def test_of_multiples_of_each_other_no_number_is_told() -> None:
    a = gradient(1.0, 2.0, 3.0)
    assert multiples(5 * a, a, 2 * a) is None
    assert multiples(a, a, torch.zeros_like(a)) is None


def test_what_is_not_finite_gives_no_number() -> None:
    a, b = gradient(1.0, float("nan")), gradient(0.0, 1.0)
    assert multiples(a, a, b) is None
