"""Clips by value before all is there: played on what the loop added, they leave its gradient.

A clip by norm that comes too early is a factor, and weights show it. Clamping is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivtest.compare.gradient import AgainstReplay
from equivtest.compare.value_clip import ValueClip
from equivtest.diagnose.addends import Addends
from equivtest.diagnose.clip import early, place
from equivtest.diagnose.diagnosis import Corrected, Diagnosis
from equivtest.diagnose.path import concerning, in_turn
from equivtest.distance import MaybeTensors, dense, distance, ratio
from equivtest.observe.trace import GradientOperation, UpdateTrace


def clamped(
    u: int,
    clip: ValueClip,
    addends: Addends,
    seen: Sequence[UpdateTrace],
    gradients: Sequence[MaybeTensors],
    a: Sequence[AgainstReplay],
    names: Sequence[str],
) -> Corrected | None:
    """Clamps before the last backward or reduction, where they explain the gradients.

    Args:
        gradients: by rank, in the order of ``names``.
    """
    found = early(seen[0])
    if not any(op.kind == "clamp" for op in found):
        return None
    scale = seen[0].scale or 1.0
    for bound in dict.fromkeys((clip.bound * scale, clip.bound)):
        for share in dict.fromkeys((1.0, 1.0 / len(seen))):
            play = _Play(addends, seen, names, bound, share)
            if all(play.holds(t, gradients, one) for t, one in enumerate(a)):
                corrected = [
                    [play.corrected(t, r, g) for t, g in enumerate(held)]
                    for r, held in enumerate(gradients)
                ]
                return Corrected(corrected, _told(u, seen[0], found[0], clip.bound))
    return None


@dataclass(frozen=True)
class _Play:
    """The operations of an update on ``.grad``, with a bound and a share of a collective's sum."""

    addends: Addends
    seen: Sequence[UpdateTrace]
    names: Sequence[str]
    bound: float
    share: float

    def holds(self, t: int, gradients: Sequence[MaybeTensors], one: AgainstReplay) -> bool:
        """Tensor ``t`` is what they leave, on every rank."""
        left = self.left(t, clamping=True)
        scale = self.addends.replay.scale[t]
        for r, gradient in enumerate(gradients):
            predicted = None if left is None else left[r]
            if (predicted is None) != (gradient[t] is None):
                return False
            if not ratio(distance(predicted, gradient[t]), scale) <= one.tolerance:
                return False
        return True

    def corrected(self, t: int, r: int, given: Tensor | None) -> Tensor | None:
        """``given`` with what clamps took away put back."""
        low, full = self.left(t, clamping=True), self.left(t, clamping=False)
        if given is None or low is None or full is None:
            return given
        return (dense(given).double() + full[r].double() - low[r].double()).to(given.dtype)

    def left(self, t: int, *, clamping: bool) -> list[Tensor] | None:
        """``.grad`` by rank; None where ranks do not go together or nothing is there."""
        D = len(self.seen)
        own = [list(concerning(self.names[t], update.operations)) for update in self.seen]
        order = in_turn(own)
        held: list[Tensor | None] = [None] * D
        for rank, op in order or ():
            if rank is not None:
                held[rank] = self._alone(t, rank, op, held[rank], clamping)
                continue
            given = [h for h in held if h is not None]
            if len(given) < D:
                return None
            total = torch.stack(given).sum(0)
            held = [total * (1.0 / D if op.kind == "reduce" else self.share)] * D
        return None if order is None else self._unscaled([h for h in held if h is not None], own)

    def _alone(
        self, t: int, r: int, op: GradientOperation, held: Tensor | None, clamping: bool
    ) -> Tensor | None:
        if op.kind == "backward":
            for k in op.microbatches:
                part = self.addends.own(r, k, t)
                held = part if held is None else held if part is None else held + part
            return held
        if op.kind == "zero" or held is None:
            return None
        if op.kind == "clamp":
            return held.clamp(-self.bound, self.bound) if clamping else held
        return held * op.factor

    def _unscaled(
        self, held: list[Tensor], operations: Sequence[Sequence[GradientOperation]]
    ) -> list[Tensor] | None:
        if len(held) < len(self.seen):
            return None
        return [
            h / update.scale if update.scale and not any(op.kind == "unscale" for op in own) else h
            for h, own, update in zip(held, operations, self.seen, strict=True)
        ]


def _told(u: int, seen: UpdateTrace, first: GradientOperation, bound: float) -> Diagnosis:
    cause, where = place(seen, first)
    text = (
        f"in update {u} gradients were clamped to {bound:g} {where}: played on the microbatches' "
        "own gradients, that is what is left"
    )
    return Diagnosis(cause, text, update=u)
