"""A loop whose replicas see each other's examples: beside the batch that they make together.

A contrastive loss over features gathered from all replicas is no sum over the plan's microbatches:
its gradient is that of the microbatches of one number taken together (of the large batch itself, if
there is one a replica), and the plan's split, in which examples see fewer others, says nothing of
it. A mistake in the gather leaves tensors before it a multiple of what they should be, and others
right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from equivtest.compare import noise
from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstOracle
from equivtest.compare.tolerance import floors, oracle_tolerance
from equivtest.distance import MaybeTensors, accumulate, farthest, norms, ratio

APART = 4.0
"""Tolerances by which the batch taken together must be away from the plan's split, to tell which
of them a loop has."""


@dataclass(frozen=True)
class Together:
    """What multiple of the gradient of microbatches taken together each tensor holds.

    Attributes:
        factors: 1, D or 1/D by position; None where the tensor is not judged.
        whole: the large batch is what they are together.
    """

    factors: Sequence[float | None]
    whole: bool

    @property
    def right(self) -> bool:
        return all(factor in (None, 1.0) for factor in self.factors)


def together(
    arms: UpdateArms, gradients: Sequence[MaybeTensors], c: AgainstOracle
) -> Together | None:
    """The loop's gradient as multiples of that of microbatches taken together; None if it is not.

    Asked where the split is not the large batch and the loop's forwards are not the replay's: a
    loop that has the plan's own losses has computed the split.

    Args:
        gradients: the loop's by rank, in the order of ``arms.names``.
    """
    drew = c.drew or arms.drew
    if not (c.split_failures and c.repeatable) or drew or arms.replay.shared:
        return None
    found = (_multiples(arms, gradients, c, *reference) for reference in _references(arms))
    return next((one for one in found if one is not None), None)


def _references(arms: UpdateArms) -> Iterator[tuple[MaybeTensors, bool]]:
    yield arms.oracle.gradients, True
    rounds = tuple(tuple(i for ids in at for i in ids) for at in zip(*arms.group.ids, strict=True))
    if len(rounds) > 1 and len(arms.group.ids) > 1:
        yield arms.oracle.cut(tuple(ids for ids in rounds if ids)).gradients, False


def _multiples(
    arms: UpdateArms,
    gradients: Sequence[MaybeTensors],
    c: AgainstOracle,
    truth: MaybeTensors,
    whole: bool,
) -> Together | None:
    scale, D = arms.oracle.scale, len(gradients)
    away = noise.relative(arms.split.gradients, truth, scale)
    tolerances, sizes = _tolerances(arms, c), norms(truth)
    factors: list[float | None] = []
    told = False
    for t, tolerance in enumerate(tolerances):
        if c.null[t] or c.capped[t]:
            factors.append(None)
            continue
        factor = _multiple(gradients, truth, t, tolerance * scale[t], D)
        if factor is None:
            return None
        blind = ratio(sizes[t], scale[t]) <= 2 * tolerance
        factors.append(None if blind else factor)
        told |= not blind and t in c.split_failures and away[t] > APART * tolerance
    fails = any(c.fails(t) for t, null in enumerate(c.null) if null)
    return Together(factors, whole) if told and not fails else None


def _multiple(
    gradients: Sequence[MaybeTensors], truth: MaybeTensors, t: int, allowed: float, D: int
) -> float | None:
    """What multiple of ``truth`` tensor ``t`` is on every rank."""
    held = [[gradient[t]] for gradient in gradients]
    if any((gradient is None) != (truth[t] is None) for [gradient] in held):
        return None
    for factor in dict.fromkeys((1.0, float(D), 1.0 / D)):
        wanted: list[Tensor | None] = [None]
        accumulate(wanted, [truth[t]], factor)
        if farthest(held, wanted)[0] <= max(factor, 1.0) * allowed:
            return factor
    return None


def _tolerances(arms: UpdateArms, c: AgainstOracle) -> list[float]:
    """C's, with a floor that holds the replay's own distance from the split as well."""
    cut, precision = arms.split, arms.case.precision
    sizes = [0 if g is None else g.numel() for g in cut.gradients]
    own = floors([noise.relative(arms.replay.expected, cut.gradients, arms.oracle.scale)], sizes)
    return [oracle_tolerance(precision, max(f, o)) for f, o in zip(c.floor, own, strict=True)]


def states_together(found: Together, states: Sequence[str]) -> list[str]:
    """The states of tensors as multiples of what they should be decide them."""
    return [
        state if state == "equal" or factor is None else "rounding" if factor == 1.0 else "differs"
        for state, factor in zip(states, found.factors, strict=True)
    ]


def together_note(found: Together) -> list[str]:
    """By what a right loop was judged that has not the plan's split."""
    if not found.right:
        return []
    what = (
        "the large batch itself, not its microbatches'"
        if found.whole
        else "the replicas' microbatches of one number taken together"
    )
    return [
        f"the loop has the gradient of {what}: its examples see each other over the replicas (a "
        "gather), so that gradient in float64 judges it and not the replay"
    ]
