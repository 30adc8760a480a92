"""Where a gradient that is not finite comes from: a count of zero, a low sum, a microbatch."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch

from equivtest.arms.replay import Replay
from equivtest.causes import Cause
from equivtest.compare.arms import UpdateArms
from equivtest.compare.verdict import Finding
from equivtest.diagnose.addends import Addends, Way
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.diagnose.path import Place
from equivtest.distance import MaybeTensors, dense, finite
from equivtest.isolate.skip.overflow import first_microbatch
from equivtest.observe.trace import MicrobatchTrace, UpdateTrace

HERE = (Cause.NONFINITE, Cause.GRADIENT, Cause.LOSS, Cause.SCALER_SKIP)
"""What a gradient that is not finite makes of its own update."""

AFTERWARDS = ("", Cause.NONFINITE, Cause.GRADIENT, Cause.LOSS, Cause.BUFFERS)
"""And of those that start from parameters which are not finite since: nothing there is evidence."""


def nonfinite(
    arms: UpdateArms, gradients: Sequence[MaybeTensors], findings: Sequence[Finding]
) -> Iterator[Diagnosis]:
    """What made a gradient of the update not finite, if it started from finite parameters.

    Args:
        gradients: the loop's by rank.
        findings: of this update so far.
    """
    if all(all(finite(gradient)) for gradient in gradients) or not _finite_start(arms.seen[0]):
        return
    for one in (_empty(arms), _reduced_in_half(arms, gradients)):
        if one is not None:
            yield one
            return
    applied = [finding for finding in findings if finding.cause == Cause.NONFINITE]
    if applied:
        text = f"{applied[0].text}{_first(arms.replay, arms.names)}"
        yield _diagnosis(Cause.NONFINITE, text, arms, (Cause.NONFINITE,))


def _diagnosis(cause: Cause, text: str, arms: UpdateArms, here: Collection[str]) -> Diagnosis:
    updates = arms.traces[0].updates
    later = [v for v in range(arms.u + 1, len(updates)) if not _finite_start(updates[v])]
    covers = (Covers(here, updates=(arms.u,)), Covers(AFTERWARDS, updates=later))
    return Diagnosis(cause, text, covers, update=arms.u)


def _finite_start(update: UpdateTrace) -> bool:
    return all(finite(list(update.start.parameters.values())))


# -- a count of zero


def _empty(arms: UpdateArms) -> Diagnosis | None:
    """A microbatch without a supervised element whose loss or factor is not finite."""
    counts = arms.reference.counts(arms.group)
    empty = {
        (r, k)
        for r, replica in enumerate(counts)
        for k, terms in enumerate(replica)
        if any(count == 0 for count in terms.values())
    }
    odd = {
        (r, k): value
        for r, replica in enumerate(arms.microbatches)
        for k, microbatch in enumerate(replica)
        if (value := _odd(microbatch)) is not None
    }
    named = sorted(empty & odd.keys())
    if not named:
        return None
    r, k = named[0]
    more = f" ({len(named)} such microbatches)" if len(named) > 1 else ""
    text = (
        f"microbatch {k} of replica {r} in update {arms.u} has no supervised element, and its loss "
        f"went into backward {odd[r, k]}{more}: what was divided by its count is not finite"
    )
    alone = empty.issuperset(odd) and empty.issuperset(_not_finite(arms.replay))
    return _diagnosis(Cause.EMPTY_MICROBATCH, text, arms, HERE if alone else (Cause.NONFINITE,))


def _odd(microbatch: MicrobatchTrace) -> str | None:
    """What of its loss is not finite, in words."""
    if microbatch.root is not None and not math.isfinite(microbatch.root):
        return f"as {microbatch.root}"
    for what, values in (("times", microbatch.factors), ("from a sum of", microbatch.totals)):
        for value in values:
            if value is not None and not math.isfinite(value):
                return f"{what} {value}"
    return None


def _not_finite(replay: Replay) -> set[Place]:
    return {key for key, norms in replay.added.items() if not all(map(math.isfinite, norms))}


# -- a reduction that leaves float16's range


def _reduced_in_half(arms: UpdateArms, gradients: Sequence[MaybeTensors]) -> Diagnosis | None:
    """Finite on every replica, and not finite just where a sum in float16 over them is not.

    On every rank: a reduction leaves them all the same, and what one holds alone came after it.
    """
    if not all(finite(arms.replay.expected)):
        return None
    sent = any(c.dtype == "float16" for update in arms.seen for c in update.collectives)
    if not (sent or arms.seen[0].comm_hook):  # the wrapper's own reduction keeps the dtype
        return None
    addends = Addends.of(arms.replayed(keep=True), gradients[0])
    if addends is None:
        return None
    for way in addends.ways(torch.float32):
        if way.dtype != torch.float16 or not way.reduced:
            continue
        if all(_same_gaps(addends, way, gradient) for gradient in gradients):
            hook = arms.seen[0].comm_hook
            text = (
                f"the replicas' own gradients of update {arms.u} are finite and reach "
                f"{_largest(addends):.4g}; added up over {len(gradients)} replicas in float16"
                f"{f' (communication hook {hook})' if hook else ''}, which holds 65504, they are "
                "not, in the very elements where the loop's are not"
            )
            return _diagnosis(Cause.HOOK_FP16_RANGE, text, arms, HERE)
    return None


def _same_gaps(addends: Addends, way: Way, gradient: MaybeTensors) -> bool:
    """The sums are finite where the gradient is, element by element.

    A partial sum may leave the range or not with the rank that the ring begins with.
    """
    for t, given in enumerate(gradient):
        sums = [low for low in addends.summed(t, way) if low is not None]
        if given is None or not sums:
            continue
        fits = [low.isfinite() == dense(given).isfinite() for low in sums]
        if not torch.stack(fits).any(0).all():
            return False
    return True


def _largest(addends: Addends) -> float:
    means = map(addends.average, range(len(addends.dtypes)))
    return max((float(mean.abs().max()) for mean in means if mean is not None), default=0.0)


# -- anything else


def _first(replay: Replay, names: Sequence[str]) -> str:
    """The first microbatch whose own gradient is not finite, in words."""
    found = first_microbatch(replay, names, frozenset(names))
    if found is None:
        return ": that of every microbatch is, and what they add up to is not"
    (r, k), tensor, many = found
    more = f", and {many - 1} more are not" if many > 1 else ""
    return f": that of microbatch {k} on replica {r} is not, first in {tensor!r}{more}"
