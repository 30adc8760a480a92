"""The tolerances of the three comparisons, and of the weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from equivtest.plan import Plan
from equivtest.precision import Precision, half_subnormal, unit_roundoff

FLOAT64_CAP = 1e-9
"""Float64 noise beyond which it is no noise."""

SPLIT = 64.0
"""Noise floors that comparison B allows."""

SMALL = 64
"""Elements up to which a tensor's own floor is too few draws: the median over tensors stands in."""

WEIGHT_SIGMAS = 4.0
WEIGHT_ROUNDOFFS = 1e3
"""A weight is another weight beyond ``max(4 sigma, 1e3 u)``."""


def replay_tolerance(plan: Plan, dtype: torch.dtype, elements: int, scale: float) -> float:
    """A: ``4 sqrt(A D) u``, for a sum of ``A D`` terms in some order; u of the gradient's dtype.

    Below the dtype's normal range an addition rounds by half the smallest subnormal, whatever the
    size of its operands: with ``n`` elements that adds ``sqrt(n)`` of it to the distance. Only
    float16 gradients come near it (2**-25; float32 and bfloat16 have 2**-150 and 2**-134). Where
    the microbatches' gradients are all zeros (``scale`` 0) no addition rounds.
    """
    absolute = math.sqrt(elements) * half_subnormal(dtype) / scale if scale > 0 else 0.0
    return 4.0 * math.sqrt(plan.A * plan.D) * (unit_roundoff(dtype) + absolute)


def split_tolerance(floor: float) -> float:
    """B: ``64 max(floor, 4u)`` in float64."""
    return SPLIT * max(floor, 4.0 * 2.0**-53)


def oracle_tolerance(precision: Precision, floor: float) -> float:
    """C: ``kappa max(floor, c u)``."""
    return precision.kappa * max(floor, precision.c * precision.u)


def floors(distances: Sequence[Sequence[float]], sizes: Sequence[int]) -> list[float]:
    """Noise floor by tensor: the largest distance over the runs.

    Args:
        distances: relative distance by run and tensor.
        sizes: elements by tensor; small ones get at least the median over all tensors.
    """
    if not distances:
        return [0.0] * len(sizes)
    largest = [max(run[t] for run in distances) for t in range(len(sizes))]
    finite = sorted(f for f in largest if math.isfinite(f))
    median = finite[len(finite) // 2] if finite else 0.0
    return [max(f, median) if n <= SMALL else f for f, n in zip(largest, sizes, strict=True)]
