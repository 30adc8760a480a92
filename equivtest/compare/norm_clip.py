"""A clip by the total norm: replayed, and the gradient before one that was written by hand.

A clip written by hand starts from a gradient that the loop may first have divided or reduced by
hand as well. What the optimizer received is known. Where the clip did not touch it, that is the
gradient; where it did, its direction is known and its size is what the clip took away: an update
does not depend on it, and it cannot be judged.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import all_same
from equivtest.compare.distance import apart, total
from equivtest.observe.trace import Gradients, UpdateTrace
from equivtest.precision import unit_roundoff

AT_BOUND = 1e-3
"""Relative distance from the bound within which a norm is the clip's doing."""

HIDDEN = "a clip written by hand hides the size of the gradient: only its direction was judged"


@dataclass(frozen=True)
class Received:
    """What the optimizer received, read as the gradient.

    Attributes:
        factor: by what a clip at its bound multiplied the plan's gradient; 1 where it did nothing.
        note: what could not be judged for it.
    """

    factor: float
    note: str

    def as_clipped(self, replay: Replay) -> Replay:
        """The replay as the clip would have left it: where received gradients are compared.

        There, and not after dividing by the factor again, rounding is that of the dtype.
        """
        return replace(
            replay,
            expected=[None if e is None else e * self.factor for e in replay.expected],
            scale=[s * self.factor for s in replay.scale],
        )

    def before_clip(self, update: UpdateTrace) -> UpdateTrace:
        """The update with the gradient that the clip must have had, for what is reported of it."""
        gradient = {n: None if g is None else g / self.factor for n, g in update.clipped.items()}
        return replace(update, gradient=gradient if self.factor != 1.0 else update.clipped)


@dataclass(frozen=True)
class NormClip:
    """``clip_grad_norm_`` with ``bound``."""

    bound: float

    def clipped(self, gradient: Gradients) -> dict[str, Tensor | None]:
        """``clip_grad_norm_`` on a copy of the gradient."""
        holders = {n: nn.Parameter(g.clone()) for n, g in gradient.items() if g is not None}
        for name, holder in holders.items():
            given = gradient[name]
            assert given is not None
            holder.grad = given.clone()
        clip_grad_norm_(list(holders.values()), self.bound)
        return {n: holders[n].grad if n in holders else None for n in gradient}

    def distance(self, update: UpdateTrace) -> float:
        """How far what was received is from the clipped gradient, relative to its norm.

        A clip written by hand may leave out torch's 1e-6 in the denominator: the nearer one counts.
        """
        wanted = self.clipped(update.gradient)
        if all_same(update.clipped, wanted):
            return 0.0
        size = total(list(update.gradient.values()))
        exact = min(1.0, self.bound / size) if size else 1.0
        by_hand = {n: None if g is None else g * exact for n, g in update.gradient.items()}
        return min(apart(update.clipped, wanted), apart(update.clipped, by_hand))

    def tolerance(self, update: UpdateTrace) -> float:
        """Rounding of a norm and of a product, in units of the gradient's dtype.

        torch's own clip differs from its replay by its implementation's last bits at most; one
        written by hand also by how it adds up the norm.
        """
        dtypes = [g.dtype for g in update.clipped.values() if g is not None]
        units = 4 if update.clip_bounds else 8
        return units * max(map(unit_roundoff, dtypes), default=2.0**-53)

    def active(self, update: UpdateTrace) -> bool:
        """The gradient is beyond the bound, by more than the rounding of its norm."""
        size = total(list(update.gradient.values()))
        return size > self.bound * (1 + self.tolerance(update) / 4)

    def size(self, update: UpdateTrace) -> str:
        """What is compared with the bound, in words."""
        return f"the gradient's norm is {total(list(update.gradient.values())):.4g}"

    def received(self, update: UpdateTrace, plan: Gradients) -> Received | None:
        """The gradient as read from what the optimizer received; None if the clip tells it better.

        Args:
            plan: the plan's gradient, whose size stands in for one that a clip took away.
        """
        if update.norm_taken and self.distance(update) <= self.tolerance(update):
            return None
        wanted, found = total(list(plan.values())), total(list(update.clipped.values()))
        if abs(found - self.bound) <= AT_BOUND * self.bound and wanted > 0:
            return Received(found / wanted, HIDDEN)
        return Received(1.0, "")
