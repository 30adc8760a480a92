"""Causes on the way of a gradient from its backward to the update: reduced, cleared, clipped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.diagnose import some_tensors
from equivtest.diagnose.clip import place
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import UpdateEvidence
from equivtest.diagnose.factor import on_everything
from equivtest.diagnose.path import ADDING, JOINT, until_last_backward
from equivtest.diagnose.weighing import Weighed
from equivtest.observe.trace import GradientOperation, UpdateTrace

BY_RANK = (
    Cause.NEVER_SYNCHRONISED,
    Cause.INVERTED_BOUNDARY,
    Cause.FLAG_AFTER_FORWARD,
    Cause.SCALE_DIFFERS,
    Cause.PARAM_REPLACED,
    Cause.SOME_UNREDUCED,
)
"""Causes that leave replicas with other gradients."""


@dataclass(frozen=True)
class Told:
    """What the path of one update's gradient is read as.

    Attributes:
        causes: named on the path.
        factor_left: a factor on everything that has no place on the path: it is the loss's.
        by_rank: replicas hold other gradients for it.
    """

    causes: tuple[Diagnosis, ...]
    factor_left: float = 1.0
    by_rank: bool = False


def told(one: UpdateEvidence, weighed: Weighed) -> Told:
    """Read the path of ``one``, which was ``weighed``."""
    extra, u = weighed.extra, one.u
    causes = [*some_tensors.unreduced(one, weighed), *some_tensors.left_over(one, weighed)]
    replaced = any(d.cause is Cause.PARAM_REPLACED for d in causes)
    if not replaced:  # it may stop all reduction
        causes += _synchronised(one)
    causes += [*_cleared(one), *_clipped(one), *_scaled(one)]
    by_rank = any(d.cause in BY_RANK for d in causes)
    if extra.own and not replaced:
        causes.append(Diagnosis(Cause.NEVER_SYNCHRONISED, _own(one), update=u))
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
    factor, by_path = on_everything(one, weighed.roots, extra.factor)
    causes += by_path
    return Told(tuple(causes), factor * extra.decay, by_rank)


# -- synchronisation


def _synchronised(one: UpdateEvidence) -> Iterator[Diagnosis]:
    """No reduction at all, or none with the last backward, where the path shows it."""
    D, first = len(one.seen), one.seen[0]
    if D == 1 or not first.operations or _joint_at_end(first):
        return
    microbatches = first.microbatches
    reducing = [k for k, m in enumerate(microbatches) if _reduced_with(first, k)]
    if not any(op.kind in JOINT for op in first.operations):
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
    kinds = [op.kind for op in update.operations if op.kind in ADDING]
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
    update, begun = one.seen[0], False
    for op in until_last_backward(update.operations):
        begun |= op.kind == "backward"
        if op.kind == "zero" and begun:
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
        else f"only the last {left} microbatches of each replica count"
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
        if early:
            cause, where = place(update, early[0])
            factors = ", ".join(f"{op.factor:.4g}" for op in early[:6])
            text = f"in update {one.u} the gradient was clipped {where}, by {factors}"
            yield Diagnosis(cause, text, update=one.u)
            return


def _scaled(one: UpdateEvidence) -> Iterator[Diagnosis]:
    scales = [[m.scale for m in update.microbatches] for update in one.seen]
    if any(len(set(own)) > 1 for own in scales):
        text = f"in update {one.u} the loss scale was {_in_words(scales[0])} by microbatch"
        yield Diagnosis(Cause.SCALE_CHANGES_INSIDE_GROUP, text, update=one.u)
    starts = [own[0] for own in scales if own]
    if len(set(starts)) > 1:
        text = f"in update {one.u} the loss scale was {_in_words(starts)} by rank"
        yield Diagnosis(Cause.SCALE_DIFFERS, text, update=one.u)
    if any(op.kind == "unscale" and op.factor != 1.0 for op in _inside(one.seen[0])):
        text = f"in update {one.u} gradients were unscaled between backward passes"
        yield Diagnosis(Cause.UNSCALE_PER_MICRO, text, update=one.u)


def _in_words(scales: Sequence[float | None]) -> str:
    return ", ".join("none" if s is None else f"{s:g}" for s in scales)


def _inside(update: UpdateTrace) -> Sequence[GradientOperation]:
    """Operations between the first backward and the last backward or reduction."""
    kinds = [op.kind for op in update.operations]
    held = [i for i, kind in enumerate(kinds) if kind in ADDING]
    return update.operations[held[0] : held[-1]] if held else ()
