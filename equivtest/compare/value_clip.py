"""A clip by value: replayed, and the gradient before one that was written by hand.

Every element within the bound is the gradient's own. Of one at the bound only that is known: how
far beyond it was is what the clip took away, no update depends on it, and it cannot be judged.
Clamping moves no two numbers apart, so that received gradients are compared with the plan's clamped
ones within the tolerance of the gradient itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import all_same
from equivtest.distance import apart, dense, multiple, times
from equivtest.observe.trace import Gradients, UpdateTrace
from equivtest.precision import half_subnormal, unit_roundoff

BY_HAND_UNITS = 2.0
"""Roundoffs of a clip by hand: it may clamp scaled gradients, and take out the scale after that."""

HIDDEN = (
    "a clip by value written by hand hides how far elements were beyond the bound: they were "
    "judged to be at it"
)


@dataclass(frozen=True)
class Clamped:
    """What the optimizer received, read as the plan's gradient clamped.

    Attributes:
        plan: the plan's gradient by name, before the clip, in the order of a replay's.
        bounds: what each is clamped to; infinite where nothing that was received is at the bound.
        note: what could not be judged for it.
    """

    plan: Gradients
    bounds: Mapping[str, float]
    note: str

    def as_clipped(self, replay: Replay) -> Replay:
        """The replay as the clip would have left it: where received gradients are compared."""
        return replace(replay, expected=[_clamp(g, self.bounds[n]) for n, g in self.plan.items()])

    def holds(self, received: Gradients, allowed: Mapping[str, float]) -> bool:
        """What the plan has beyond the bound by more than ``allowed`` is at it, with its sign.

        A small bound leaves nothing of a distance that is measured against the whole gradient.
        """
        return all(
            found is None or self._at_the_bound(name, dense(found), allowed[name])
            for name, found in received.items()
            if name in self.plan and math.isfinite(self.bounds[name])
        )

    def _at_the_bound(self, name: str, found: Tensor, allowed: float) -> bool:
        planned, bound = self.plan[name], self.bounds[name]
        if planned is None or planned.shape != found.shape:
            return False
        beyond = planned.abs() > bound + allowed
        off = (found.to(planned.dtype) - planned.clamp(-bound, bound))[beyond].abs()
        return bool((off <= BY_HAND_UNITS * unit_roundoff(found.dtype) * bound).all())

    def before_clip(self, update: UpdateTrace) -> UpdateTrace:
        """The update with the gradient that the clip must have had, for what is reported of it.

        The plan's stands in for what the clip took away.
        """
        gradient = {n: self._before(n, g) for n, g in update.clipped.items()}
        return replace(update, gradient=gradient)

    def _before(self, name: str, found: Tensor | None) -> Tensor | None:
        planned = self.plan.get(name)
        if found is None or planned is None:
            return found
        found, planned, bound = dense(found), planned.to(found.dtype), self.bounds[name]
        taken = (found == planned.clamp(-bound, bound)) & (found != planned)
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
        return 0.0 if update.clip_bounds else BY_HAND_UNITS * max(_roundoffs(update), default=0.0)

    def active(self, update: UpdateTrace) -> bool:
        """Some element of the gradient is beyond the bound."""
        return not all_same(_held(update, update.gradient), self._wanted(update))

    def size(self, update: UpdateTrace) -> str:
        """What is compared with the bound, in words."""
        largest = max(map(_largest, _held(update, update.gradient).values()), default=0.0)
        return f"the gradient's largest element is {largest:.4g}"

    def multiplied(self, update: UpdateTrace) -> dict[str, Tensor | None] | None:
        """The gradient before a clip by hand, where what was accumulated was multiplied before it.

        The elements within the bound tell by what number; None where that does not give the others,
        or nothing was multiplied.
        """
        given, received = _held(update, update.gradient), _held(update, update.clipped)
        if all_same(received, given):
            return None
        within = {n: self._within(g) for n, g in received.items() if g is not None}
        number = multiple(
            [_where(within.get(n), g) for n, g in received.items()],
            [_where(within.get(n), given.get(n)) for n in received],
        )
        largest = max(_roundoffs(update), default=0.0)
        if number <= 0 or abs(number - 1) <= 2 * BY_HAND_UNITS * largest:
            return None
        before = times(update.gradient, number)
        off = apart(received, self.clipped({n: before.get(n) for n in received}))
        return before if off <= BY_HAND_UNITS * largest else None

    def _within(self, received: Tensor) -> Tensor:
        """Elements that no clamp can have made."""
        room = 2 * BY_HAND_UNITS * unit_roundoff(received.dtype)
        return dense(received).abs() < self.bound * (1 - room)

    def received(self, update: UpdateTrace, plan: Gradients) -> Clamped:
        """The gradient as read from what the optimizer received.

        A tensor of which nothing is at the bound was not clamped to it. In half precision the
        gradient's tolerance can be larger than the bound, and would pass a smaller one.

        Args:
            plan: the plan's gradient.
        """
        reached = {n: self._reached(update.clipped.get(n)) for n in plan}
        bounds = {n: self.bound if at_bound else math.inf for n, at_bound in reached.items()}
        beyond = any(reached[n] and _largest(g) > self.bound for n, g in plan.items())
        return Clamped(plan, bounds, HIDDEN if beyond else "")

    def _reached(self, received: Tensor | None) -> bool:
        """An element is at the bound, as a clip by hand may round it, or beyond."""
        if received is None:
            return False
        once = self.bound * unit_roundoff(received.dtype) + half_subnormal(received.dtype)
        return _largest(received) >= self.bound - BY_HAND_UNITS * once

    def _wanted(self, update: UpdateTrace) -> dict[str, Tensor | None]:
        return self.clipped(_held(update, update.gradient))


def _held(update: UpdateTrace, gradient: Gradients) -> dict[str, Tensor | None]:
    held = {name for optimizer in update.optimizers for name in optimizer.names}
    return {name: g for name, g in gradient.items() if name in held}


def _roundoffs(update: UpdateTrace) -> list[float]:
    return [unit_roundoff(g.dtype) for g in update.clipped.values() if g is not None]


def _where(mask: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """The gradient with zeros elsewhere."""
    if mask is None or gradient is None:
        return None
    return torch.where(mask, dense(gradient), 0.0)


def _largest(gradient: Tensor | None) -> float:
    if gradient is None or gradient.numel() == 0:
        return 0.0
    return float(dense(gradient).abs().max())


def _clamp(gradient: Tensor | None, bound: float) -> Tensor | None:
    return None if gradient is None else dense(gradient).clamp(-bound, bound)
