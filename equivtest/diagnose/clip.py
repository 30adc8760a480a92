"""Clips at the wrong time: of scaled gradients, or of each replica's own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from equivtest.causes import Cause
from equivtest.compare.clip import Clip, clip_of
from equivtest.compare.continuity import all_same
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.distance import accumulate, apart, total
from equivtest.observe.trace import Gradients, UpdateTrace

NEAR = 1e-4
"""How near a prediction must come, relatively, beyond the rounding of the clip: what is added to a
norm before it divides is another share of it in other units."""


def before_unscale(evidence: Evidence) -> Iterator[Diagnosis]:
    """A clip at the experiment's bound, of gradients that the loss scale still multiplied."""
    clip = clip_of(evidence.experiment, evidence.case.device)
    if clip is None:
        return
    beside = {finding.update for finding in evidence.found(Cause.CLIP)}
    for one in evidence.updates:
        seen = one.seen[0]
        bound = bound_in_units(seen)
        if one.u not in beside or bound is None or not seen.clipped_scaled or not seen.scale:
            continue
        if not math.isclose(bound * seen.scale, clip.bound, rel_tol=NEAR):
            continue
        scaled = replace(clip, bound=bound)
        if apart(seen.clipped, scaled.clipped(seen.gradient)) > clip.tolerance(seen) + NEAR:
            continue
        yield Diagnosis(
            Cause.CLIP_BEFORE_UNSCALE,
            f"the clip of update {one.u} came before unscale, at a loss scale of {seen.scale:g}: "
            f"what was received is the gradient clipped at {clip.bound:g}/{seen.scale:g} = "
            f"{bound:.3g}",
            (Covers((Cause.CLIP,), updates=(one.u,)),),
            update=one.u,
        )


def bound_in_units(seen: UpdateTrace) -> float | None:
    """The bound of the last clip that was seen, in units of the unscaled gradient."""
    if not seen.clip_bounds:
        return None
    scaled = seen.clipped_scaled and seen.scale
    return seen.clip_bounds[-1] / (seen.scale if scaled else 1.0)  # type: ignore[operator]


@dataclass(frozen=True)
class ClippedAlone:
    """Replicas that clipped what they held alone, and reduced what was left.

    Attributes:
        seen: the update by rank, with the gradient that their reduction would have given.
    """

    seen: list[UpdateTrace]
    diagnosis: Diagnosis | None
    note: str = ""


def clipped_alone(u: int, clip: Clip | None, seen: Sequence[UpdateTrace]) -> ClippedAlone | None:
    """Gradients that differ by rank at the clip and do not after it, explained by a reduction."""
    bounds = [bound_in_units(update) for update in seen]
    first, bound = seen[0], bounds[0]
    if clip is None or bound is None or any(b != bound for b in bounds):
        return None
    if all(all_same(first.gradient, update.gradient) for update in seen[1:]):
        return None
    if not all(all_same(first.clipped, update.clipped) for update in seen[1:]):
        return None
    at = replace(clip, bound=bound)
    reduced = _average([at.clipped(update.gradient) for update in seen])
    for times in (1.0, float(len(seen)), 1.0 / len(seen)):
        predicted = _times(reduced, times)
        if apart(first.clipped, predicted) <= clip.tolerance(first) + NEAR:
            break
    else:
        return None
    own = _times(_average([update.gradient for update in seen]), times)
    sizes = [total(list(update.gradient.values())) for update in seen]
    active = not all_same(_average([update.gradient for update in seen]), reduced)
    text = (
        f"the replicas clipped their own gradients in update {u}, of norms "
        f"{', '.join(f'{size:.3g}' for size in sizes[:4])} at the bound {bound:.3g}, and reduced "
        "what was left: that is what was received"
    )
    told = [replace(update, gradient=_like(own, update.gradient)) for update in seen]
    if not active:
        return ClippedAlone(told, None, f"update {u}: {_INACTIVE}")
    covers = Covers((Cause.CLIP,), updates=(u,))
    return ClippedAlone(told, Diagnosis(Cause.CLIP_BEFORE_SYNC, text, (covers,), update=u))


_INACTIVE = (
    "each replica's own gradient was clipped before the reduction: below the bound that changes "
    "nothing, above it, it would"
)


def _average(gradients: Sequence[Gradients]) -> dict[str, Tensor | None]:
    """In float64."""
    names = list(gradients[0])
    summed: list[Tensor | None] = [None] * len(names)
    for gradient in gradients:
        accumulate(summed, [gradient.get(name) for name in names], 1.0 / len(gradients))
    return dict(zip(names, summed, strict=True))


def _times(gradient: Gradients, factor: float) -> dict[str, Tensor | None]:
    return {n: None if g is None else g * factor for n, g in gradient.items()}


def _like(gradient: Gradients, other: Gradients) -> dict[str, Tensor | None]:
    """In the dtypes of ``other``."""
    pairs = ((n, gradient.get(n), held) for n, held in other.items())
    return {n: g if g is None or held is None else g.to(held.dtype) for n, g, held in pairs}
