"""A clip by the total norm: replayed, and the gradient before one that was written by hand.

A clip written by hand starts from a gradient that the loop may first have divided or reduced by
hand as well. What the optimizer received is known. Where the clip did not touch it, that is the
gradient; where it did, its direction is known and its size is what the clip took away: an update
does not depend on it, and it cannot be judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from equivtest.arms.replay import Replay
from equivtest.compare.continuity import all_same
from equivtest.distance import apart, dense, distance, total
from equivtest.observe.trace import Gradients, UpdateTrace
from equivtest.precision import unit_roundoff

CLIP_UNITS = 8.0
"""Roundoffs that a clip may be off: the norm's, its factor's and the product's. The norm alone, its
tensors in another order, moves by 2.5 u (up to 600 tensors) or 5 u (2,000); drawn clips reach 3.7 u
by torch and 2.6 u by hand in 250 updates."""

NORM_UNITS = 2.0
"""Roundoffs of the norm within which no clip is asked for: its own last bits."""

EPSILON = 1e-6
"""What ``clip_grad_norm_`` adds to the norm in its denominator."""

AT_BOUND = 1e-3
"""Relative distance from the bound within which a norm is the clip's doing: what ``EPSILON`` takes
from a gradient of norm 1e-3. In half precision a clip rounds more, 2.0 u in 209 updates: there
``CLIP_UNITS`` u."""

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
    """``clip_grad_norm_`` with ``bound``, replayed on ``device``: its order of a sum counts."""

    bound: float
    device: str = "cpu"

    def clipped(self, gradient: Gradients) -> dict[str, Tensor | None]:
        """``clip_grad_norm_`` on a copy of the gradient, sparse ones made dense; on the host."""
        given = {
            n: dense(g).to(self.device, copy=True) for n, g in gradient.items() if g is not None
        }
        holders = {n: nn.Parameter(g.clone()) for n, g in given.items()}
        for name, holder in holders.items():
            holder.grad = given[name]
        clip_grad_norm_(list(holders.values()), self.bound)
        clipped = {n: holder.grad for n, holder in holders.items() if holder.grad is not None}
        return {n: clipped[n].cpu() if n in clipped else None for n in gradient}

    def distance(self, update: UpdateTrace) -> float:
        """How far what was received is from the clipped gradient, relative to its norm.

        A clip written by hand may leave out ``EPSILON``, and may take a better norm than torch's,
        which in float32 is 1,000 u off for three million elements: the nearest one counts.
        """
        clipped = self._clipped_in_turn(update)
        if any(all_same(update.clipped, one) for one in clipped):
            return 0.0
        given = update.gradient.items()
        gradients = [g for _, g in given if g is not None]
        on_device = [dense(g).to(self.device) for g in gradients]
        sizes = {total(gradients), float(get_total_norm(on_device))}
        # One that clips the sum to a scaled bound, and divides it then, has scaled EPSILON too.
        more = {0.0, EPSILON, *(EPSILON * self.bound / b for b in update.clip_bounds if b)}
        factors = {self._factor(size + epsilon) for size in sizes for epsilon in more}
        by_hand = ({n: None if g is None else g * f for n, g in given} for f in factors)
        of_each = {
            n: min((one.get(n) for one in clipped), key=partial(distance, g))
            for n, g in update.clipped.items()
        }
        return min(apart(update.clipped, one) for one in (of_each, *by_hand))

    def _clipped_in_turn(self, update: UpdateTrace) -> list[dict[str, Tensor | None]]:
        """After each clip that was seen, once one had the bound, until one was tighter.

        A clip that is called again takes away what ``EPSILON`` left; what an optimizer received is
        as it was when that one ran.
        """
        held, clipped, tightest = dict(update.gradient), [], math.inf
        for bound in update.clip_bounds or (self.bound,):
            held, tightest = replace(self, bound=bound).clipped(held), min(tightest, bound)
            clipped += [held] if tightest == self.bound else []
        return clipped or [self.clipped(update.gradient)]

    def _factor(self, size: float) -> float:
        return min(1.0, self.bound / size) if size else 1.0

    def tolerance(self, update: UpdateTrace) -> float:
        """Rounding of a norm and of a product, in units of the gradient's dtype."""
        return CLIP_UNITS * _roundoff(update)

    def active(self, update: UpdateTrace) -> bool:
        """The gradient is beyond the bound, by more than the rounding of its norm."""
        size = total(list(update.gradient.values()))
        return size > self.bound * (1 + NORM_UNITS * _roundoff(update))

    def size(self, update: UpdateTrace) -> str:
        """What is compared with the bound, in words."""
        return f"the gradient's norm is {total(list(update.gradient.values())):.4g}"

    def received(self, update: UpdateTrace, plan: Gradients) -> Received | None:
        """The gradient as read from what the optimizer received; None if the clip tells it better.

        Args:
            plan: the plan's gradient, whose size stands in for one that a clip took away.
        """
        # A clip that was seen with another bound may have had the gradient in another scale.
        own = update.norm_taken and not update.clip_bounds
        if own and self.distance(update) <= self.tolerance(update):
            return None
        wanted, found = total(list(plan.values())), total(list(update.clipped.values()))
        allowed = max(AT_BOUND, CLIP_UNITS * _roundoff(update))
        if abs(found - self.bound) <= allowed * self.bound and wanted > 0:
            # Of a loop whose own norm is just above the bound the plan's may be just below it.
            return Received(min(1.0, found / wanted), HIDDEN)
        return Received(1.0, "")


def _roundoff(update: UpdateTrace) -> float:
    """The largest u of what the optimizer received."""
    dtypes = [g.dtype for g in update.clipped.values() if g is not None]
    return max(map(unit_roundoff, dtypes), default=2.0**-53)
