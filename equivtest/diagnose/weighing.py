"""What an update's gradient is made of: microbatches by weight, an earlier group, a scalar.

The weights that a loop's own operations and root factors predict are tried first, then what they
would be with one thing more that nothing observed says (a scalar, gradients cleared, an earlier
group's left in). Where no root factor was observed the fitted weights stand for them
(``compare.weights``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from equivtest.arms.replay import Replay
from equivtest.compare.arms import UpdateArms
from equivtest.compare.gradient import AgainstReplay
from equivtest.compare.weights import Weights
from equivtest.diagnose.extras import extras
from equivtest.diagnose.prediction import NOTHING, Extra, Prediction
from equivtest.diagnose.roots import Roots, common_values, roots
from equivtest.distance import MaybeTensors, finite
from equivtest.observe.trace import UpdateTrace

SURE = 0.25
"""Uncertainty up to which fitted weights stand for root factors: 1 is then told from 1/2."""

MANY = 8
"""Elements of tensors that one number fits by no accident."""


@dataclass(frozen=True)
class Weighed:
    """What the gradient of an update is made of that is not the plan's.

    Attributes:
        roots: root factors over the expected ones; None where they could not be read.
        extra: what is in the gradient beside what was observed.
        partly: what is beside it in some parameters only, by their names.
        explained: parameters whose gradient these give within tolerance.
        left: those beyond tolerance that they do not give.
        overflowed: the gradient is not finite, and only its root factors could be read.
        common_values: each backward started from the loss of all replicas' microbatches.
    """

    roots: Roots | None = None
    extra: Extra = NOTHING
    partly: Mapping[str, Extra] = field(default_factory=dict)
    explained: frozenset[str] = frozenset()
    left: frozenset[str] = frozenset()
    overflowed: bool = False
    common_values: bool = False


def overflowed(arms: UpdateArms, seen: Sequence[UpdateTrace]) -> Weighed | None:
    """An update whose gradient is not finite: a factor on the loss may be why. None if none is."""
    read = roots(seen, arms.replay, arms.counts, arms.case.precision)
    if read is None or read.read != "factors" or read.right:
        return None
    return Weighed(read, overflowed=True)


def weighed(
    arms: UpdateArms,
    seen: Sequence[UpdateTrace],
    gradients: Sequence[MaybeTensors],
    a: Sequence[AgainstReplay],
    weights: Weights | None,
    null: Sequence[bool] = (),
) -> Weighed:
    """Weigh an update that comparison A does not acquit.

    Args:
        seen: by rank, with the gradient that is judged.
        gradients: by rank, in the order of ``arms.names``.
        a: comparison A of them.
        weights: fitted to them, if they were.
        null: by tensor, zero in exact arithmetic: what it holds is rounding, and tells nothing.
    """
    kept, precision = arms.replayed(keep=True), arms.case.precision
    nothing = {t for t, is_null in enumerate(null) if is_null}
    beyond = frozenset(arms.names[t] for t, one in enumerate(a) if not (one.within or t in nothing))
    if not kept.by_term or not all(all(finite(part)) for part in kept.by_term.values()):
        return Weighed(left=beyond)
    read = roots(seen, kept, arms.counts, precision) or _from_weights(kept, weights)
    if read is None:
        return Weighed(left=beyond)
    prediction = Prediction(arms, seen, gradients, kept, read, a)
    extra, fine, partly = _explaining(prediction, nothing)
    explained = frozenset(arms.names[t] for t in (*fine, *partly))
    return Weighed(
        read,
        extra,
        {arms.names[t]: other for t, other in partly.items()},
        explained=explained,
        left=beyond - explained,
        common_values=common_values(seen, kept, arms.counts, precision, read),
    )


def _from_weights(replay: Replay, weights: Weights | None) -> Roots | None:
    """Root factors as the fitted weights tell them, where they tell and all ranks agree."""
    if weights is None or not weights.determined:
        return None
    found = {
        (r, k, term): weights.found[r, k]
        for r, k, term in replay.by_term
        if (r, k) in weights.found
    }
    spread = max(4 * sigma for sigma in weights.sigma.values())
    return Roots(found, spread, "weights") if found and spread < SURE else None


def _explaining(
    prediction: Prediction, nothing: Collection[int]
) -> tuple[Extra, list[int], dict[int, Extra]]:
    """The extra that gives most tensors, which these are, and by tensor another that gives more."""
    scales = enumerate(prediction.replay.scale)
    every = [t for t, scale in scales if 0 < scale < math.inf and t not in nothing]
    extra, fine = _best(prediction, every)
    if not fine or len(fine) == len(every):
        return extra, fine, {}
    # What one extra gives of some tensors may be nothing of the loop's as a whole.
    plain = [t for t in every if prediction.holds(NOTHING, t)]
    if plain:
        extra, fine = NOTHING, plain
    other, more = _best(prediction, [t for t in every if t not in fine])
    # Another number on some tensors only tells nothing.
    told = other.own or (other.earlier and _no_accident(prediction, other.earlier, more))
    return extra, fine, dict.fromkeys(more, other) if told else {}


def _no_accident(prediction: Prediction, earlier: float, tensors: Sequence[int]) -> bool:
    """What was left over gives these tensors: many elements, or few of them a number that may be.

    Once, or D times where replicas' sums are added; the loss scale is out of it already.
    """
    expected = [prediction.replay.expected[t] for t in tensors]
    elements = sum(g.numel() for g in expected if g is not None)
    scale = prediction.seen[0].scale or 1.0
    plain = [float(n) / s for n in (1, len(prediction.seen)) for s in (1.0, scale)]
    return elements >= MANY or any(math.isclose(earlier, p, rel_tol=1e-3) for p in plain)


def _best(prediction: Prediction, tensors: Sequence[int]) -> tuple[Extra, list[int]]:
    """The extra that gives most of these tensors, the first of equals; and which it gives."""
    best: tuple[Extra, list[int]] = NOTHING, []
    for extra in extras(prediction, tensors):
        fine = [t for t in tensors if prediction.holds(extra, t)]
        if len(fine) > len(best[1]):
            best = (extra, fine)
        if len(fine) == len(tensors):
            break
    return best
