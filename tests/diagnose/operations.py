"""Updates as ranks would leave them: operations on gradients, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from equivtest.observe.trace import GradientOperation, MicrobatchTrace, State, UpdateTrace


def backward(k: int) -> GradientOperation:
    """Of microbatch ``k`` alone."""
    return GradientOperation("backward", k, (k,))


def zero(k: int) -> GradientOperation:
    """``zero_grad`` after microbatch ``k`` had begun."""
    return GradientOperation("zero", k)


REDUCE = GradientOperation("reduce")
COLLECTIVE = GradientOperation("collective")


def times(kind: str, factor: float) -> GradientOperation:
    """An unscale or a clip by norm that multiplied gradients by ``factor``."""
    return GradientOperation(kind, factor=factor)


def an_update(
    operations: Sequence[GradientOperation] = (),
    microbatches: Sequence[MicrobatchTrace] = (),
    **changes: Any,
) -> UpdateTrace:
    """One update of a rank without a parameter."""
    nothing = State({}, {})
    return UpdateTrace(
        tuple(microbatches),
        nothing,
        {},
        {},
        {},
        {},
        nothing,
        {},
        (),
        True,
        operations=tuple(operations),
        **changes,
    )
