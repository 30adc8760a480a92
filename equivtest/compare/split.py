"""The loop beside the float64 split, where a source keeps the oracle from judging it.

Where the split is not the large batch (B fails) the oracle's distance says nothing of the loop, and
that sources explain the split says nothing either: a loop with another ``eps`` in its BatchNorm is
as far from the plan as before. A right loop that shares no bits with the replay still has the
split's gradient, but for the rounding of a forward of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from equivtest.compare import noise
from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstOracle, AgainstReplay
from equivtest.compare.telling import over
from equivtest.compare.tolerance import floors, oracle_tolerance
from equivtest.compare.verdict import Finding
from equivtest.distance import MaybeTensors, farthest, norms, ratio


def undecided(states: Sequence[str], a: Sequence[AgainstReplay], c: AgainstOracle) -> list[int]:
    """Tensors beyond A that C could not judge because the split is not right."""
    if not (c.split_failures and c.repeatable):
        return []
    return [
        t
        for t, (state, one) in enumerate(zip(states, a, strict=True))
        if state == "not judged" and not one.within and not c.null[t]
    ]


def beside_cut(
    arms: UpdateArms,
    gradients: Sequence[MaybeTensors],
    states: Sequence[str],
    a: Sequence[AgainstReplay],
    c: AgainstOracle,
) -> list[str]:
    """The states, with those that are ``undecided`` as their distance from the split decides.

    If the loop's forwards have the plan's examples and draw nothing: with other microbatches or
    other random numbers a right loop has another gradient. By C's rules, with a floor made of the
    replay's own distance from the split and the large batch's from the oracle: both are rounding.

    Args:
        gradients: the candidate's, by rank.
    """
    tensors, decided = undecided(states, a, c), list(states)
    planned = all(
        [m.ids for m in replica] == list(ids)
        for replica, ids in zip(arms.microbatches, arms.group.ids, strict=True)
    )
    if not tensors or not planned or c.drew or arms.drew:
        return decided
    cut, oracle, precision = arms.split, arms.oracle, arms.case.precision
    scale = oracle.scale
    sizes = [0 if g is None else g.numel() for g in cut.gradients]
    floor = floors(
        [
            noise.relative(arms.replay.expected, cut.gradients, scale),
            noise.relative(arms.large.gradients, oracle.gradients, scale),
        ],
        sizes,
    )
    away, held = farthest(gradients, cut.gradients), norms(cut.gradients)
    for t in tensors:
        tolerance = oracle_tolerance(precision, floor[t])
        if floor[t] > precision.cap:
            continue
        if ratio(away[t], scale[t]) > tolerance:
            decided[t] = "differs"
        elif ratio(held[t], scale[t]) > 2 * tolerance:
            decided[t] = "rounding"
    return decided


def undecided_finding(
    u: int, names: Sequence[str], a: Sequence[AgainstReplay], tensors: Sequence[int]
) -> list[Finding]:
    """A loop that neither the replay acquits nor anything else can judge."""
    if not tensors:
        return []
    worst = max(tensors, key=lambda t: over(a[t].distance, a[t].tolerance))
    one = a[worst]
    text = (
        f"gradient of {names[worst]!r} is {one.distance:.3g} of its scale away from the plan's in "
        f"update {u}, allowed {one.tolerance:.3g} ({len(tensors)} of {len(a)} tensors). Other "
        "random numbers than the replay's, other microbatches than the plan's and a fault of the "
        "loop look the same here: a source of the split explains none of it"
    )
    return [
        Finding(
            "",
            text,
            update=u,
            rank=one.rank,
            tensor=names[worst],
            distance=one.distance,
            tolerance=one.tolerance,
        )
    ]
