"""Sums in a lower dtype than the gradient's: taken so from what the loop added, they give it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.causes import Cause
from equivtest.diagnose.addends import Addends, Way, nearest
from equivtest.diagnose.diagnosis import Corrected, Diagnosis
from equivtest.distance import MaybeTensors, dense, multiple, norm, ratio
from equivtest.observe.trace import UpdateTrace
from equivtest.precision import unit_roundoff

LEFT = 0.3
"""Share of the distance that a right prediction may leave: ties that round the other way."""

MANY = 32
"""Elements from which on a share tells; with fewer a prediction must hold to the last bits."""

BITS = 16.0
"""Roundoffs of the gradient's own dtype that last bits may be: of its own sums and products."""

LOOKED_AT = 1 << 17
"""Elements on which the way is looked for, the smallest tensors first; it is then taken on all."""


@dataclass(frozen=True)
class _Prediction:
    """Sums taken one way, times ``alpha``, and by tensor how far they are from the gradient."""

    way: Way
    alpha: float
    apart: Sequence[float]

    @property
    def left(self) -> float:
        """Over all tensors, each over its scale."""
        return math.sqrt(sum(d**2 for d in self.apart))


def low_sums(
    u: int, gradients: Sequence[MaybeTensors], replay: Replay, seen: Sequence[UpdateTrace]
) -> Corrected | None:
    """Sums in a low dtype that explain the gradients of update ``u``, or None.

    Args:
        gradients: the loop's by rank, in the order of the replay's.
        replay: with its microbatches' contributions kept.
    """
    addends = Addends.of(replay, gradients[0])
    if addends is None:
        return None
    held = addends.as_held(seen) if seen[0].operations else addends
    for weighed in (addends, held) if held.weights else (addends,):
        looked_at = _LookedAt(weighed, addends, gradients[0], replay)
        found = looked_at.found()
        if found is not None:
            return _low_sums(u, weighed, looked_at, found, gradients, seen)
    return None


def _low_sums(
    u: int,
    addends: Addends,
    looked_at: _LookedAt,
    found: _Prediction,
    gradients: Sequence[MaybeTensors],
    seen: Sequence[UpdateTrace],
) -> Corrected:
    way, alpha = found.way, found.alpha
    corrected = [
        [_corrected(addends, t, g, way, alpha) for t, g in enumerate(held)] for held in gradients
    ]
    told = Diagnosis(_cause(way, looked_at), looked_at.text(u, found, seen[0]), update=u)
    return Corrected(corrected, told)


def _corrected(
    addends: Addends, t: int, given: Tensor | None, way: Way, alpha: float
) -> Tensor | None:
    """``given`` with the difference of the sums put back."""
    full, low = addends.average(t), addends.summed(t, way)
    if given is None or full is None:
        return given
    held = dense(given).double()
    candidates = [one for one in low if one is not None]
    return (held + full.double() * alpha - nearest(held, candidates, alpha)).to(given.dtype)


class _LookedAt:
    """The tensors on which ways are tried.

    Args:
        planned: the addends as the plan has them, each once.
    """

    def __init__(
        self, addends: Addends, planned: Addends, gradient: MaybeTensors, replay: Replay
    ) -> None:
        self.addends, self.scale = addends, replay.scale
        sizes = {
            t: g.numel()
            for t, g in enumerate(gradient)
            if g is not None and 0 < replay.scale[t] < math.inf and addends.average(t) is not None
        }
        self.at: list[int] = []
        self.elements = 0
        for t in sorted(sizes, key=sizes.__getitem__):
            if not self.at or self.elements + sizes[t] <= LOOKED_AT:
                self.at.append(t)
                self.elements += sizes[t]
        self.given = {t: dense(g).double() for t in self.at if (g := gradient[t]) is not None}
        dtypes = [g.dtype for t in self.at if (g := gradient[t]) is not None]
        self.dtype = max(dtypes, key=unit_roundoff, default=None)
        self.full = {t: self.candidates(t, None) for t in self.at}
        wanted = [replay.expected[t] for t in self.at]
        # What the plan makes of one unit of the average, and what the loop seems to.
        self.planned = multiple(wanted, [planned.average(t) for t in self.at])

    def candidates(self, t: int, way: Way | None) -> list[Tensor]:
        return [one for one in self.addends.summed(t, way) if one is not None]

    def found(self) -> _Prediction | None:
        """The way that leaves least, if one explains the gradient."""
        if self.dtype is None:
            return None
        for given in (self.planned, None):
            before = self.predicted(None, given)
            tried = [self.predicted(way, given) for way in self.addends.ways(self.dtype)]
            best = min(tried, key=lambda one: one.left, default=None)
            if best is not None and self._holds(best, before):
                return best
        return None

    def predicted(self, way: Way | None, alpha: float | None) -> _Prediction:
        """Sums taken this way times ``alpha``, or what fits best."""
        taken = {t: self.full[t] if way is None else self.candidates(t, way) for t in self.at}
        if alpha is None:
            alpha = multiple(list(self.given.values()), [taken[t][0] for t in self.at])
        apart = [
            norm(given - nearest(given, taken[t], alpha)) / self.scale[t]
            for t, given in self.given.items()
        ]
        finite = [d if math.isfinite(d) else math.inf for d in apart]
        return _Prediction(way or Way(torch.float64), alpha, finite)

    def _holds(self, one: _Prediction, before: _Prediction) -> bool:
        """It leaves little, no tensor more than before, and half of them had something to lose.

        A gradient that is nothing but rounding may be near anything, and far from everything.
        """
        assert self.dtype is not None
        bits = BITS * unit_roundoff(self.dtype)
        pairs = list(zip(one.apart, before.apart, strict=True))
        touched = sum(b > bits for b in before.apart)
        return (
            one.left <= LEFT * before.left
            and (self.elements >= MANY or all(left <= bits for left in one.apart))
            and all(left <= max(b, bits) for left, b in pairs)
            and 2 * touched >= len(pairs)
        )

    def text(self, u: int, found: _Prediction, seen: UpdateTrace) -> str:
        """Why the way is what the loop did."""
        before = self.predicted(None, found.alpha).left
        name = str(found.way.dtype).removeprefix("torch.")
        where = (
            "added up over microbatches"
            if found.way.accumulated and not found.way.reduced
            else "added up over microbatches and replicas"
            if found.way.accumulated
            else "added up over replicas"
        )
        hook = f" (communication hook {seen.comm_hook})" if seen.comm_hook else ""
        return (
            f"the microbatches' own gradients, {where} in {name}{hook}, give the gradient of "
            f"update {u}: {found.left:.2g} of its scale away from it, and {before:.2g} added up in "
            f"{str(self.dtype).removeprefix('torch.')}"
        )


def _cause(way: Way, looked_at: _LookedAt) -> Cause:
    if way.accumulated:
        return Cause.LOW_PRECISION_ACCUMULATOR
    return Cause.HOOK_FP16_RANGE if _out_of_range(way, looked_at) else Cause.LOW_PRECISION_REDUCE


def _out_of_range(way: Way, looked_at: _LookedAt) -> bool:
    """Most of what is lost is lost below the dtype's normal range, and not to its mantissa."""
    if way.dtype != torch.float16:
        return False
    small = all_lost = 0.0
    for t in looked_at.at:
        full, low = looked_at.full[t][0].double(), looked_at.candidates(t, way)[0].double()
        lost = ((low - full) / looked_at.scale[t]).square()
        below = full.abs() < torch.finfo(way.dtype).smallest_normal
        small, all_lost = small + float(lost[below].sum()), all_lost + float(lost.sum())
    return ratio(small, all_lost) > 0.5
