"""A clip by value: replayed, and the gradient before one that was written by hand.

Every element within the bound is the gradient's own. Of one at the bound only that is known: how
far beyond it was is what the clip took away, no update depends on it, and it cannot be judged.
Clamping moves no two numbers apart, so that received gradients are compared with the plan's clamped
ones within the tolerance of the gradient itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import all_same
from equivtest.compare.distance import apart, dense
from equivtest.observe.trace import Gradients, UpdateTrace
from equivtest.precision import unit_roundoff

HIDDEN = (
    "a clip by value written by hand hides how far elements were beyond the bound: they were "
    "judged to be at it"
)


@dataclass(frozen=True)
class Clamped:
    """What the optimizer received, read as the plan's gradient clamped.

    Attributes:
        plan: the plan's gradient by name, before the clip.
        note: what could not be judged for it.
    """

    bound: float
    plan: Gradients
    note: str

    def as_clipped(self, replay: Replay) -> Replay:
        """The replay as the clip would have left it: where received gradients are compared."""
        return replace(replay, expected=[_clamp(e, self.bound) for e in replay.expected])

    def before_clip(self, update: UpdateTrace) -> UpdateTrace:
        """The update with the gradient that the clip must have had, for what is reported of it.

        The plan's stands in for what the clip took away.
        """
        gradient = {n: self._before(g, self.plan.get(n)) for n, g in update.clipped.items()}
        return replace(update, gradient=gradient)

    def _before(self, found: Tensor | None, planned: Tensor | None) -> Tensor | None:
        if found is None or planned is None:
            return found
        found, planned = dense(found), planned.to(found.dtype)
        taken = (found == planned.clamp(-self.bound, self.bound)) & (found != planned)
        return torch.where(taken, planned, found)


@dataclass(frozen=True)
class ValueClip:
    """``clip_grad_value_`` with ``bound``.

    A parameter that no optimizer holds is left out: its gradient has no part in any update.
    """

    bound: float

    def clipped(self, gradient: Gradients) -> dict[str, Tensor | None]:
        """The gradient clamped, in its dtype: the bits of ``clip_grad_value_``."""
        return {n: _clamp(g, self.bound) for n, g in gradient.items()}

    def distance(self, update: UpdateTrace) -> float:
        """How far what was received is from the clamped gradient, relative to its norm."""
        received, wanted = _held(update, update.clipped), self._wanted(update)
        return 0.0 if all_same(received, wanted) else apart(received, wanted)

    def tolerance(self, update: UpdateTrace) -> float:
        """None: a clamp does not round.

        A loop that clips by hand may take out the scale by hand as well, and clamp before that: at
        each it rounds once more than what it is compared with.
        """
        dtypes = [g.dtype for g in update.clipped.values() if g is not None]
        return 0.0 if update.clip_bounds else 2 * max(map(unit_roundoff, dtypes), default=0.0)

    def active(self, update: UpdateTrace) -> bool:
        """Some element of the gradient is beyond the bound."""
        return not all_same(_held(update, update.gradient), self._wanted(update))

    def size(self, update: UpdateTrace) -> str:
        """What is compared with the bound, in words."""
        held = _held(update, update.gradient).values()
        largest = max(
            (float(g.abs().max()) for g in held if g is not None and g.numel()), default=0
        )
        return f"the gradient's largest element is {largest:.4g}"

    def received(self, update: UpdateTrace, plan: Gradients) -> Clamped:
        """The gradient as read from what the optimizer received.

        Args:
            plan: the plan's gradient.
        """
        beyond = not all_same(plan, self.clipped(plan))
        return Clamped(self.bound, plan, HIDDEN if beyond else "")

    def _wanted(self, update: UpdateTrace) -> dict[str, Tensor | None]:
        return self.clipped(_held(update, update.gradient))


def _held(update: UpdateTrace, gradient: Gradients) -> dict[str, Tensor | None]:
    held = {name for optimizer in update.optimizers for name in optimizer.names}
    return {name: g for name, g in gradient.items() if name in held}


def _clamp(gradient: Tensor | None, bound: float) -> Tensor | None:
    return None if gradient is None else dense(gradient).clamp(-bound, bound)
