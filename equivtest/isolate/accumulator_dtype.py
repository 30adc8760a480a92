"""``source.accumulator_dtype``: sums kept in the low dtype that the precision promises. Pure.

256 + 1 is 256 in bfloat16. Isolated by the same addends in the same order, in float32; a loop that
keeps such sums in any other precision has a fault.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from equivtest.causes import Cause
from equivtest.distance import minus
from equivtest.isolate.sums import Summed, SumSource, worst
from equivtest.precision import Precision, unit_roundoff


def promised(precision: Precision) -> bool:
    """Gradients, and so their sums, have fewer bits than float32."""
    return unit_roundoff(precision.parameters) > unit_roundoff(torch.float32)


def detect(summed: Summed, precision: Precision, names: Sequence[str]) -> list[SumSource]:
    """The sums of such a precision."""
    if not promised(precision):
        return []
    kept = str(precision.parameters)[6:]
    away = summed.apart(summed.gradient, summed.float32)
    text = (
        f"Sums of {summed.terms} microbatches in {kept} are up to {worst(away, names)} of a "
        f"gradient's scale away from the same sums in float32; apart: {summed.orders(names)}"
    )
    error = minus(summed.gradient, summed.float32)
    return [SumSource(str(Cause.ACCUMULATOR_DTYPE), error, f"in sums kept in {kept}", text)]
