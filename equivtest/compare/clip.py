"""The clip replayed on the candidate's own gradient, and the gradient before a clip by hand.

A clip written by hand starts from a gradient that the loop may first have divided or reduced by
hand as well. What the optimizer received is known. Where the clip did not touch it, that is the
gradient; where it did, its direction is known and its size is what the clip took away: an update
does not depend on it, and it cannot be judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from equivtest.arms.replay import Replay
from equivtest.compare.cause import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.distance import MaybeTensors, distance, norms, ratio
from equivtest.compare.verdict import Finding
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

    def shrunk(self, replay: Replay) -> Replay:
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


def received(update: UpdateTrace, expected: MaybeTensors, bound: float) -> Received:
    """Read the gradient from what the optimizer received.

    Args:
        expected: the plan's gradient, whose size stands in for one that a clip took away.
        bound: the experiment's bound on the total norm.
    """
    wanted, found = total(expected), total(list(update.clipped.values()))
    if abs(found - bound) <= AT_BOUND * bound and wanted > 0:
        return Received(found / wanted, HIDDEN)
    return Received(1.0, "")


def total(tensors: MaybeTensors) -> float:
    """Norm over all tensors."""
    return sum(n**2 for n in norms(tensors)) ** 0.5


def clipped(gradient: Gradients, bound: float) -> dict[str, Tensor | None]:
    """``clip_grad_norm_`` on a copy of the gradient."""
    holders = {n: nn.Parameter(g.clone()) for n, g in gradient.items() if g is not None}
    for name, holder in holders.items():
        given = gradient[name]
        assert given is not None
        holder.grad = given.clone()
    clip_grad_norm_(list(holders.values()), bound)
    return {n: holders[n].grad if n in holders else None for n in gradient}


def clip_distance(update: UpdateTrace, bound: float) -> float:
    """How far the clipped gradient is from the bound's, over all tensors, relative to its norm.

    A clip written by hand may leave out torch's 1e-6 in the denominator: the nearer one counts.
    """
    wanted = clipped(update.gradient, bound)
    if _all_same(update.clipped, wanted):
        return 0.0
    size = total(list(update.gradient.values()))
    exact = min(1.0, bound / size) if size else 1.0
    by_hand = {n: None if g is None else g * exact for n, g in update.gradient.items()}
    return min(_apart(update.clipped, wanted), _apart(update.clipped, by_hand))


def clip_tolerance(update: UpdateTrace) -> float:
    """Rounding of a norm and of a product, in units of the gradient's dtype.

    torch's own clip differs from its replay by its implementation's last bits at most; one written
    by hand also by how it adds up the norm.
    """
    dtypes = [g.dtype for g in update.clipped.values() if g is not None]
    units = 4 if update.clip_bounds else 8
    return units * max(map(unit_roundoff, dtypes), default=2.0**-53)


def clip_explains(update: UpdateTrace, bound: float) -> bool:
    """The optimizer received what the bound makes of the gradient."""
    return clip_distance(update, bound) <= clip_tolerance(update)


def judge_clip(u: int, update: UpdateTrace, bound: float | None) -> Iterator[Finding]:
    """The clip of update ``u`` against the experiment's bound, on the candidate's own gradient."""
    if bound is None:
        if not _all_same(update.clipped, update.gradient):
            yield Finding(
                Cause.CLIP,
                f"the gradient changed between its reduction and update {u}, and the experiment "
                "does not clip",
                update=u,
            )
        return
    off, allowed = clip_distance(update, bound), clip_tolerance(update)
    size = total(list(update.gradient.values()))
    beyond = size > bound * (1 + allowed / 4)
    missing = beyond and not update.clip_bounds and _all_same(update.clipped, update.gradient)
    if off <= allowed and not missing:
        return
    yield Finding(
        Cause.CLIP_MISSING if missing else Cause.CLIP,
        f"the gradient's norm is {size:.4g} before update {u}, the bound {bound:g}, and it "
        + ("was not clipped" if missing else f"is {off:.3g} away from the clipped one")
        + ("; the clip was called before unscale" if update.clipped_scaled else ""),
        update=u,
        distance=off,
        tolerance=allowed,
    )


def _all_same(a: Gradients, b: Gradients) -> bool:
    return all(same_values(a[n], b.get(n)) for n in a)


def _apart(a: Gradients, b: Gradients) -> float:
    """Distance over all tensors, relative to the norm of ``b``."""
    squared = sum(distance(a[n], b.get(n)) ** 2 for n in a)
    return ratio(squared**0.5, total(list(b.values())))
