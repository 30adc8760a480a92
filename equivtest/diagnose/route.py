"""Causes on the way of a gradient from its backward to the update: reduced, cleared, clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from equivtest.causes import Cause
from equivtest.diagnose import some_tensors
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import Evidence, UpdateEvidence
from equivtest.diagnose.path import until_last_backward
from equivtest.observe.trace import GradientOperation, UpdateTrace


@dataclass(frozen=True)
class Told:
    """What the path of one update's gradient is read as.

    Attributes:
        causes: named on the path.
        factor_left: a factor on everything that has no place on the path: it is the loss's.
        by_rank: replicas hold other gradients for it.
        complete: all that is beside the plan on the path has a name.
    """

    causes: tuple[Diagnosis, ...]
    factor_left: float = 1.0
    by_rank: bool = False
    complete: bool = True


def told(evidence: Evidence, one: UpdateEvidence) -> Told:
    """Read the path of ``one``, which was weighed."""
    weighed = one.weighed
    assert weighed is not None
    extra, u = weighed.extra, one.u
    causes = [*some_tensors.unreduced(one), *some_tensors.left_over(one)]
    replaced = any(d.cause is Cause.PARAM_REPLACED for d in causes)
    if not replaced:  # it may stop all reduction
        causes += _synchronised(one)
    causes += [*_cleared(one), *_clipped(one), *_scaled(one)]
    by_rank = any(d.cause in BY_RANK for d in causes)
    if extra.own and not replaced:
        causes.append(Diagnosis(Cause.NEVER_SYNCHRONISED, f"{_own(one)}", update=u))
        by_rank = True
    if extra.cleared:
        causes.append(Diagnosis(Cause.ONLY_LAST, _only(one, extra.cleared), update=u))
    if extra.earlier:
        causes.append(Diagnosis(Cause.STALE_CARRYOVER, _earlier(one, extra.earlier), update=u))
    if extra.decay != 1.0:
        text = (
            f"in update {u} what is added up so far is multiplied by {extra.decay:.4g} after each "
            "backward: a loss scale is taken out of early microbatches more than once"
        )
        causes.append(Diagnosis(Cause.UNSCALE_PER_MICRO, text, update=u))
    factor, by_path = _factor(evidence, one, extra.factor)
    causes += by_path
    return Told(tuple(causes), factor * extra.decay, by_rank)


BY_RANK = (
    Cause.NEVER_SYNCHRONISED,
    Cause.INVERTED_BOUNDARY,
    Cause.FLAG_AFTER_FORWARD,
    Cause.SCALE_DIFFERS,
    Cause.PARAM_REPLACED,
    Cause.SOME_UNREDUCED,
)


# -- synchronisation


def _synchronised(one: UpdateEvidence) -> Iterator[Diagnosis]:
    """No reduction at all, or none with the last backward, where the path shows it."""
    D, first = len(one.seen), one.seen[0]
    if D == 1 or not first.operations or _joint_at_end(first):
        return
    microbatches = first.microbatches
    reducing = [k for k, m in enumerate(microbatches) if _reduced_with(first, k)]
    if not any(op.kind in ("reduce", "collective") for op in first.operations):
        yield Diagnosis(Cause.NEVER_SYNCHRONISED, _own(one), update=one.u)
        return
    last = len(microbatches) - 1
    where = ", ".join(map(str, reducing)) or "none"
    if microbatches[last].flag and not microbatches[last].reduces:
        text = (
            f"in update {one.u} the wrapper was to reduce when the backward of microbatch {last} "
            f"began and was not when its forward did, where it decides; it reduced with "
            f"microbatch {where}"
        )
        yield Diagnosis(Cause.FLAG_AFTER_FORWARD, text, update=one.u)
    else:
        text = (
            f"in update {one.u} gradients were reduced with microbatch {where} and not with the "
            f"last, {last}: what came after the reduction stayed on its own replica"
        )
        yield Diagnosis(Cause.INVERTED_BOUNDARY, text, update=one.u)


def _joint_at_end(update: UpdateTrace) -> bool:
    """A reduction follows the last backward."""
    kinds = [op.kind for op in update.operations if op.kind in ("backward", "reduce", "collective")]
    return bool(kinds) and kinds[-1] != "backward"


def _reduced_with(update: UpdateTrace, k: int) -> bool:
    return any(op.kind == "reduce" and op.microbatch == k for op in update.operations)


def _own(one: UpdateEvidence) -> str:
    forwards = [m for update in one.seen for m in update.microbatches]
    why = (
        "their forwards did not go through the wrapper"
        if forwards and not any(m.wrapped for m in forwards)
        else "no backward reduced"
    )
    D = len(one.seen)
    return (
        f"in update {one.u} each replica holds its own microbatches alone, {D} times what the plan "
        f"gives them, and nothing of the others': {why}"
    )


# -- accumulation


def _cleared(one: UpdateEvidence) -> Iterator[Diagnosis]:
    """Gradients zeroed while a microbatch's was in them and another was to come."""
    for update in one.seen[:1]:
        begun = False
        for op in until_last_backward(update.operations):
            if op.kind == "backward":
                begun = True
            elif op.kind == "zero" and begun:
                k = op.microbatch or 0
                text = (
                    f"in update {one.u} zero_grad came after the backward of microbatch "
                    f"{k if _after(update, op) else max(k - 1, 0)}, with more to come: what was "
                    "added up before counts nothing"
                )
                yield Diagnosis(Cause.ONLY_LAST, text, update=one.u)
                return


def _after(update: UpdateTrace, op: GradientOperation) -> bool:
    before = update.operations[: update.operations.index(op)]
    reached = [k for b in before if b.kind == "backward" for k in b.microbatches]
    return op.microbatch in reached


def _only(one: UpdateEvidence, cleared: int) -> str:
    left = len(one.seen[0].microbatches) - cleared
    which = (
        "only the last microbatch of each replica counts"
        if left == 1
        else (f"only the last {left} microbatches of each replica count")
    )
    return f"in update {one.u} {which}: what was added up before was cleared or overwritten"


def _earlier(one: UpdateEvidence, times: float) -> str:
    return (
        f"the gradient of update {one.u} holds {times:.4g} times what update {one.u - 1} left in "
        ".grad: it was not cleared"
    )


# -- clip and loss scale inside the group


def _clipped(one: UpdateEvidence) -> Iterator[Diagnosis]:
    for update in one.seen:
        early = [op for op in _inside(update) if op.kind == "clip" and op.factor != 1.0]
        if not early:
            continue
        after_all = not any(
            op.kind == "backward" for op in update.operations[update.operations.index(early[0]) :]
        )
        if after_all:
            text = (
                f"in update {one.u} the gradient was clipped before it was reduced, by "
                f"{early[0].factor:.4g}"
            )
            yield Diagnosis(Cause.CLIP_BEFORE_SYNC, text, update=one.u)
        else:
            factors = ", ".join(f"{op.factor:.4g}" for op in early[:6])
            text = (
                f"in update {one.u} the gradient was clipped between its backward passes, by "
                f"{factors}"
            )
            yield Diagnosis(Cause.CLIP_PER_MICROBATCH, text, update=one.u)
        return


def _scaled(one: UpdateEvidence) -> Iterator[Diagnosis]:
    scales = [[m.scale for m in update.microbatches] for update in one.seen]
    if any(len(set(own)) > 1 for own in scales):
        told = ", ".join(f"{s:g}" for s in scales[0] if s is not None)
        text = f"in update {one.u} the loss scale was {told} by microbatch"
        yield Diagnosis(Cause.SCALE_CHANGES_INSIDE_GROUP, text, update=one.u)
    starts = [own[0] for own in scales if own]
    if len(set(starts)) > 1:
        told = ", ".join("none" if s is None else f"{s:g}" for s in starts)
        text = f"in update {one.u} the loss scale was {told} by rank"
        yield Diagnosis(Cause.SCALE_DIFFERS, text, update=one.u)
    for update in one.seen[:1]:
        if any(op.kind == "unscale" and op.factor != 1.0 for op in _inside(update)):
            text = f"in update {one.u} gradients were unscaled between backward passes"
            yield Diagnosis(Cause.UNSCALE_PER_MICRO, text, update=one.u)


def _inside(update: UpdateTrace) -> Sequence[GradientOperation]:
    """Operations between the first backward and the last backward or reduction."""
    kinds = [op.kind for op in update.operations]
    held = [i for i, kind in enumerate(kinds) if kind in ("backward", "reduce", "collective")]
    return update.operations[held[0] : held[-1]] if held else ()


# -- a factor on everything


def _undone(one: UpdateEvidence, factor: float) -> bool:
    """The losses carry the inverse: a loop that reduces a sum divides by the whole count."""
    read = None if one.weighed is None else one.weighed.roots
    return read is not None and all(
        math.isclose(w * factor, 1.0, rel_tol=1e-3) for w in read.found.values()
    )


def _factor(
    evidence: Evidence, one: UpdateEvidence, factor: float
) -> tuple[float, list[Diagnosis]]:
    """The factor that is left for the loss, and the causes that account for one on the path."""
    D, update = len(one.seen), one.seen[0]
    by_hand = [c for c in update.collectives if c.parameters and c.phase == "after"]
    total = factor * (D if by_hand and all(c.op == "sum" for c in by_hand) else 1.0)
    if _undone(one, total):
        return total, []
    where = (
        f"the communication hook {update.comm_hook}"
        if update.comm_hook
        else "the reduction by hand"
        if by_hand
        else ""
    )
    known = product(_of_reduction(one.u, D, where), _of_scale(one))
    for (reduced, by_reduction), (unscaled, by_scale) in known:
        if math.isclose(total, reduced * unscaled, rel_tol=1e-3):
            return 1.0, [*by_reduction, *by_scale]
    return total, []


Factor = tuple[float, list[Diagnosis]]
"""A factor on the whole gradient, and what gives it."""


def _of_reduction(u: int, D: int, where: str) -> Iterator[Factor]:
    yield 1.0, []
    if where and D > 1:
        text = f"in update {u} the gradient is D = {D} times what it should be: {where} sums"
        yield float(D), [Diagnosis(Cause.HOOK_MISSING_DIVISION, text, update=u)]
        text = (
            f"in update {u} the gradient is 1/D = 1/{D} of what it should be: {where} divides by D "
            "once more"
        )
        yield 1.0 / D, [Diagnosis(Cause.HOOK_DOUBLE_DIVISION, text, update=u)]


def _of_scale(one: UpdateEvidence) -> Iterator[Factor]:
    yield 1.0, []
    scales = {m.scale for update in one.seen for m in update.microbatches}
    for scale in sorted(s for s in scales if s not in (None, 1.0)):
        text = (
            f"in update {one.u} the gradient is 1/{scale:g} of what it should be, and the loss "
            f"scale {scale:g}: it was taken out twice"
        )
        yield 1.0 / scale, [Diagnosis(Cause.DOUBLE_UNSCALE, text, update=one.u)]
