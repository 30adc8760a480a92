"""The tolerances of the three comparisons, and of the weights.

How near correct loops come to each constant of ``compare``, drawn by ``tests/drawn.py``; ``u`` is
the unit roundoff. Constants that choose words only are named where they are used.

================================  ======  =====================================================
constant                          value   largest seen of correct loops
================================  ======  =====================================================
``SUM_UNITS``                     4       0.32 of A's tolerance in 2,000 cases
``SPLIT`` over ``LEAST_FLOOR``    64      0.85 of B's tolerance in 2,000 cases
``Precision.kappa``               4       0.50 of C's tolerance in 2,000 cases
``optimizer.KAPPA``               4       0.99 u in 51 updates by other implementations
``implementation.MOVED_APART``    0.25    0.17, and all of it last bits
``implementation.LAST_BITS``      2       1.2
``implementation.STATE_UNITS``    16      2.2 u in 541 tensors of state
``norm_clip.CLIP_UNITS``          8       3.7 u; 5 u by the order of 2,000 tensors alone
``norm_clip.AT_BOUND``            1e-3    1.3e-5 in float32; 2.0 u in half precision
``weights.EXPLAINED``             0.25    0.53 is the least that weights left of a right loop
================================  ======  =====================================================
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from equivtest.plan import Plan
from equivtest.precision import Precision, half_subnormal, unit_roundoff

FLOAT64_CAP = 1e-9
"""Float64 noise beyond which it is no noise."""

SUM_UNITS = 4.0
"""Roundoffs, times the root of its terms, that a sum in some order may be off (A): roundings of n
terms add up like a random walk, to about sqrt(n) u. Those of n equal terms do not: from 256 equal
float32 on, a right sum may be further off, and is then told from a fault by its bits
(``isolate/sums.py``)."""

SPLIT = 64.0
"""Noise floors that comparison B allows."""

LEAST_FLOOR = 4.0 * 2.0**-53
"""The least noise that B takes float64 to have: runs that happen to agree prove no less."""

SMALL = 64
"""Elements up to which a tensor's own floor is too few draws: the median over tensors stands in."""

WEIGHT_SIGMAS = 4.0
WEIGHT_ROUNDOFFS = 1e3
"""A weight is another weight beyond ``max(4 sigma, 1e3 u)``."""

FORWARD_UNITS = 4.0
"""Roundoffs of the forward that a weight or a statistic may be off in a forward of the loop's own:
as C's kappa, for rounding of a forward scales a gradient like a weight. Means of means were 43 u
off or more."""


def replay_tolerance(plan: Plan, dtype: torch.dtype, elements: int, scale: float) -> float:
    """A: ``4 sqrt(A D) u``, for a sum of ``A D`` terms in some order; u of the gradient's dtype.

    Below the dtype's normal range an addition rounds by half the smallest subnormal, whatever the
    size of its operands: with ``n`` elements that adds ``sqrt(n)`` of it to the distance. Only
    float16 gradients come near it (2**-25; float32 and bfloat16 have 2**-150 and 2**-134). Where
    the microbatches' gradients are all zeros (``scale`` 0) no addition rounds.
    """
    absolute = math.sqrt(elements) * half_subnormal(dtype) / scale if scale > 0 else 0.0
    return sum_tolerance(plan.A * plan.D, dtype, absolute)


def sum_tolerance(terms: int, dtype: torch.dtype, absolute: float = 0.0) -> float:
    """What a sum of ``terms`` may be off, relative to the sum of their norms.

    Args:
        absolute: what each addition rounds beside u, as a share of that sum.
    """
    return SUM_UNITS * math.sqrt(terms) * (unit_roundoff(dtype) + absolute)


def split_tolerance(floor: float) -> float:
    """B: ``64 max(floor, 4u)`` in float64."""
    return SPLIT * max(floor, LEAST_FLOOR)


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
