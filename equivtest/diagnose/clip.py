"""Clips at the wrong time: of scaled gradients, or before all that they are to clip is there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from equivtest.causes import Cause
from equivtest.compare.clip import clip_of
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.path import until_last_backward
from equivtest.distance import apart
from equivtest.observe.trace import GradientOperation, UpdateTrace

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
    scale = seen.scale if seen.clipped_scaled else None
    return seen.clip_bounds[-1] / (scale or 1.0)


def early(seen: UpdateTrace) -> list[GradientOperation]:
    """Clips that more was added to: a later backward, or what other replicas hold."""
    kept = until_last_backward(seen.operations)
    return [op for op in kept if op.kind in ("clip", "clamp")]


def too_early(evidence: Evidence) -> Iterator[Diagnosis]:
    """A clip that is missing at the update because it came before all was there."""
    missing = {finding.update for finding in evidence.found(Cause.CLIP_MISSING)}
    for one in evidence.updates:
        active = [op for op in early(one.seen[0]) if op.kind == "clamp" or op.factor != 1.0]
        if one.u in missing and active:
            cause, where = place(one.seen[0], active[0])
            text = f"in update {one.u} the gradient was clipped {where}, and not after that"
            yield Diagnosis(cause, text, (Covers((Cause.CLIP_MISSING,), (one.u,)),), update=one.u)


def place(seen: UpdateTrace, op: GradientOperation) -> tuple[Cause, str]:
    """The cause that an early clip is, and where it came."""
    after = seen.operations[seen.operations.index(op) :]
    if any(later.kind == "backward" for later in after):
        return Cause.CLIP_PER_MICROBATCH, "between backward passes"
    return Cause.CLIP_BEFORE_SYNC, "before the reduction over replicas"


def early_note(seen: UpdateTrace) -> Iterator[str]:
    """A clip that came too early and changed nothing."""
    found = early(seen)
    if found:
        _, where = place(seen, found[0])
        yield (
            f"the gradient is clipped {where}: below the bound that changes nothing, above it the "
            "update would not be that of the whole group"
        )
