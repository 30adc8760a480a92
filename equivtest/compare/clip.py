"""The gradient before the clip, where the clip was seen by no hook. Pure.

A clip written by hand starts from a gradient that the loop may first have divided or reduced by
hand as well. What the optimizer received is known. Where the clip did not touch it, that is the
gradient; where it did, its direction is known and its size is what the clip took away: an update
does not depend on it, and it cannot be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from equivtest.compare.distance import MaybeTensors, norms
from equivtest.observe.trace import Gradients, UpdateTrace

AT_BOUND = 1e-3
"""Relative distance from the bound within which a norm is the clip's doing."""

HIDDEN = "a clip written by hand hides the size of the gradient: only its direction was judged"


def as_received(
    seen: Sequence[UpdateTrace], expected: MaybeTensors, bound: float
) -> tuple[list[UpdateTrace], str]:
    """The updates by rank with the gradient told from what the optimizer received, and a note.

    Args:
        expected: the plan's gradient, whose size stands in for one that a clip took away.
        bound: the experiment's bound on the total norm.
    """
    wanted = total(expected)
    return (
        [_told(update, wanted, bound) for update in seen],
        HIDDEN if any(_at_bound(update, bound) for update in seen) else "",
    )


def total(tensors: MaybeTensors) -> float:
    """Norm over all tensors."""
    return sum(n**2 for n in norms(tensors)) ** 0.5


def _told(update: UpdateTrace, wanted: float, bound: float) -> UpdateTrace:
    received = total(list(update.clipped.values()))
    if not _at_bound(update, bound) or wanted < bound * (1 - AT_BOUND):
        return replace(update, gradient=update.clipped)
    return replace(update, gradient=_times(update.clipped, wanted / received))


def _at_bound(update: UpdateTrace, bound: float) -> bool:
    return abs(total(list(update.clipped.values())) - bound) <= AT_BOUND * bound


def _times(gradient: Gradients, factor: float) -> dict[str, Tensor | None]:
    return {name: None if g is None else g * factor for name, g in gradient.items()}
