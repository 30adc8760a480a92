"""What a right loop's own sums add to its gradient: all the sources there are in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.arms.replay import Replay
from equivtest.distance import MaybeTensors
from equivtest.isolate import accumulator_dtype, reduction_order
from equivtest.isolate.sums import LoopSums, Summed
from equivtest.precision import Precision


def loop_sums(
    gradient: MaybeTensors,
    replay: Replay,
    large: MaybeTensors | None,
    tolerances: Sequence[float],
    precision: Precision,
    names: Sequence[str],
) -> LoopSums | None:
    """The sources in the sums of a loop that does what the plan says (``sums.reproduced``).

    None where exact sums are not within tolerance either.

    Args:
        gradient: the loop's.
        replay: taken apart.
        large: the large batch's gradient in the case's precision, where only rounding separates it.
        tolerances: comparison A's, by tensor.
    """
    apart = replay.apart
    assert apart is not None, "the replay was taken apart"
    summed = Summed(
        gradient=gradient,
        float32=apart.float32 if accumulator_dtype.promised(precision) else gradient,
        exact=apart.exact,
        accumulated=apart.accumulated,
        large=large,
        scale=replay.scale,
        terms=len(replay.added),
    )
    left = summed.apart(summed.exact, replay.expected)
    if any(d > most for d, most in zip(left, tolerances, strict=True)):
        return None
    return LoopSums(
        sources=(
            *accumulator_dtype.detect(summed, precision, names),
            *reduction_order.detect(summed, names),
        ),
        allowed=tuple(t * scale for t, scale in zip(tolerances, replay.scale, strict=True)),
        left=tuple(left),
    )
