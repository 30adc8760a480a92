"""Which extras a gradient may hold: from nothing to what is rarer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from equivtest.diagnose.prediction import NOTHING, Extra, Prediction
from equivtest.diagnose.roots import Roots
from equivtest.distance import dense, norm

UNLIKE = 1e-9
"""Least squared sine of the angle between two gradients of which multiples are told apart."""


def extras(prediction: Prediction, tensors: Sequence[int]) -> list[Extra]:
    """Each a single thing, then with an earlier group's gradient.

    Args:
        tensors: by position, those whose gradient may be measured.
    """
    D = len(prediction.seen)
    A = max(1, *(len(update.microbatches) for update in prediction.seen))
    found = [NOTHING, *_factors(prediction, D, A)]
    measured = _measured(prediction, tensors)
    if measured is not None and all(not math.isclose(measured, e.factor) for e in found):
        found.append(Extra(factor=measured))
    cleared = range(A - 1, 0, -1)
    found += [Extra(cleared=k) for k in cleared]
    if D > 1:
        found += [Extra(own=True), *(Extra(cleared=k, own=True) for k in cleared)]
    return [*found, *_decaying(prediction.roots), *_with_earlier(prediction, tensors)]


def _factors(prediction: Prediction, D: int, A: int) -> list[Extra]:
    """Those that loops multiply by: D, A and the loss scale, too often or once too few."""
    factors = [float(D), 1.0 / D, 1.0 / D**2, float(A), 1.0 / A]
    scale = prediction.seen[0].scale
    if scale is not None and scale != 1.0:
        factors += [1.0 / scale, scale]
    return [Extra(factor=f) for f in dict.fromkeys(factors) if f != 1.0]


def _measured(prediction: Prediction, tensors: Sequence[int]) -> float | None:
    """The factor that is nearest on the largest tensor."""
    t = max(tensors, key=lambda t: prediction.replay.scale[t], default=None)
    if t is None:
        return None
    predicted, given = prediction.gradient(NOTHING, 0, t), prediction.given[0][t]
    if predicted is None or given is None or predicted.shape != given.shape:
        return None
    size, along = _dot(predicted, predicted), _dot(predicted, dense(given).to(predicted.dtype))
    return along / size if size > 0 and along else None


def _decaying(roots: Roots) -> list[Extra]:
    """One factor on every loss that is taken out after each backward, of all there is."""
    factors = list(roots.found.values())
    first = factors[0] if factors else 1.0
    alike = all(math.isclose(f, first, rel_tol=roots.tolerance) for f in factors)
    return [Extra(decay=1.0 / first)] if alike and first > 1.0 + roots.tolerance else []


def _with_earlier(prediction: Prediction, tensors: Sequence[int]) -> list[Extra]:
    """An earlier group's gradient times what fits it best on the tensor that holds most of it.

    Beside the plan's as it is, and beside the plan's times what fits that best.
    """
    if prediction.arms.u == 0 or not tensors:
        return []
    t = max(tensors, key=lambda t: norm(prediction.earlier(0, t)))
    earlier, given = prediction.earlier(0, t), prediction.given[0][t]
    predicted = prediction.gradient(NOTHING, 0, t)
    if earlier is None or predicted is None or given is None or not norm(earlier):
        return []
    target = dense(given).to(predicted.dtype)
    alone = _dot(earlier, target - predicted) / _dot(earlier, earlier)
    both = multiples(target, predicted, earlier)
    beside = [] if both is None else [Extra(factor=both[0], earlier=both[1])]
    return [Extra(earlier=alone), *beside]


def multiples(target: Tensor, a: Tensor, b: Tensor) -> tuple[float, float] | None:
    """Of ``a`` and of ``b``, what together is nearest to ``target``; None where they are alike."""
    aa, ab, bb = _dot(a, a), _dot(a, b), _dot(b, b)
    at, bt = _dot(a, target), _dot(b, target)
    determinant = aa * bb - ab**2
    if not determinant > UNLIKE * aa * bb:
        return None
    return (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.conj() * b).sum().real)
