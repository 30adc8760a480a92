"""A factor on a whole gradient that something on its path gives: a reduction, a loss scale."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

from equivtest.causes import Cause
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.evidence import UpdateEvidence
from equivtest.diagnose.roots import Roots

NEAR = 1e-3
"""How near, relatively, a factor must come to one that has a name: those are far apart."""

Factor = tuple[float, list[Diagnosis]]
"""A factor on the whole gradient, and what gives it."""


def on_everything(one: UpdateEvidence, roots: Roots | None, factor: float) -> Factor:
    """The part of ``factor`` that is left for the loss, and causes on the path that give the rest.

    Args:
        roots: root factors of the update's losses, where they were read.
        factor: on the gradient, beside its root factors.
    """
    D, update = len(one.seen), one.seen[0]
    by_hand = [c for c in update.collectives if c.parameters and c.phase == "after"]
    total = factor * (D if by_hand and all(c.op == "sum" for c in by_hand) else 1.0)
    if _undone(roots, total):
        return total, []
    where = "the reduction by hand" if by_hand else ""
    where = f"the communication hook {update.comm_hook}" if update.comm_hook else where
    others: tuple[Cause, ...] = ()
    if not where and _by_hand_again(one, roots, total):
        where = "the loop, after its backward passes,"
        if len(update.microbatches) == D:
            others = (Cause.DOUBLE_ACCUM_DIVISION,)
    known = product(_of_reduction(one.u, D, where, others), _of_scale(one))
    for (reduced, by_reduction), (unscaled, by_scale) in known:
        if math.isclose(total, reduced * unscaled, rel_tol=NEAR):
            return 1.0, [*by_reduction, *by_scale]
    return total, []


def _by_hand_again(one: UpdateEvidence, roots: Roots | None, factor: float) -> bool:
    """1/D that no loss carries: gradients that the wrapper averaged are divided by hand."""
    right = roots is not None and roots.read == "factors" and roots.right
    return right and math.isclose(factor, 1.0 / len(one.seen), rel_tol=NEAR)


def _undone(roots: Roots | None, factor: float) -> bool:
    """The losses carry the inverse: a loop that reduces a sum divides by the whole count."""
    return roots is not None and all(
        math.isclose(w * factor, 1.0, rel_tol=NEAR) for w in roots.found.values()
    )


def _of_reduction(u: int, D: int, where: str, others: tuple[Cause, ...]) -> Iterator[Factor]:
    yield 1.0, []
    if where and D > 1:
        text = f"in update {u} the gradient is D = {D} times what it should be: {where} sums"
        yield float(D), [Diagnosis(Cause.HOOK_MISSING_DIVISION, text, update=u)]
        text = (
            f"in update {u} the gradient is 1/D = 1/{D} of what it should be: {where} divides by D "
            "once more"
        )
        cause = Cause.HOOK_DOUBLE_DIVISION
        yield 1.0 / D, [Diagnosis(cause, text, update=u, alternatives=others)]


def _of_scale(one: UpdateEvidence) -> Iterator[Factor]:
    yield 1.0, []
    scales = {m.scale for update in one.seen for m in update.microbatches if m.scale is not None}
    for scale in sorted(scales - {1.0}):
        text = (
            f"in update {one.u} the gradient is 1/{scale:g} of what it should be, and the loss "
            f"scale {scale:g}: it was taken out twice"
        )
        yield 1.0 / scale, [Diagnosis(Cause.DOUBLE_UNSCALE, text, update=one.u)]
