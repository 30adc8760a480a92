"""``source.reduction_order``: the order in which float32 or float64 additions round. Pure.

A sum of n terms rounds like a random walk, to about sqrt(n) u of them, and comparison A allows four
times as much. Additions that round the same way go beyond: 1 and n times 2**-24 are 1 in float32,
n u away, and so do equal terms (of 4,000 numbers added up n times, the worst was 1.0 of A's
tolerance away at n = 256 and 4.0 at n = 4,096; random vectors 0.005 and 0.001). Isolated by an
exact sum of the same terms.
"""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.causes import Cause
from equivtest.distance import minus
from equivtest.isolate.sums import Summed, SumSource, worst


def detect(summed: Summed, names: Sequence[str]) -> list[SumSource]:
    """The sums, in float32 at least, that every group's gradient goes through."""
    away = summed.apart(summed.float32, summed.exact)
    text = (
        f"Sums of {summed.terms} microbatches, in their order and in float32 at least, are up to "
        f"{worst(away, names)} of a gradient's scale away from exact ones; apart: "
        f"{summed.orders(names)}"
    )
    more = max(summed.accumulation, default=0.0) >= max(summed.all_reduce, default=0.0)
    where = "in the accumulation" if more else "in the all-reduce"
    error = minus(summed.float32, summed.exact)
    return [SumSource(str(Cause.REDUCTION_ORDER), error, where, text)]
