"""Modules that the loop ran in another mode than ``model()`` left them in.

The replay runs in the loop's modes, so that whatever else is wrong is seen beside it. Whether the
modes matter is asked of a replay in those that ``model()`` left.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from equivtest.causes import Cause
from equivtest.compare.arms import UpdateArms
from equivtest.compare.continuity import all_same
from equivtest.compare.tolerance import replay_tolerance
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.distance import difference, ratio


def changed_modes(arms: UpdateArms) -> Iterator[Diagnosis]:
    """Modes that the loop changed, where that changes the gradient or the buffers."""
    odd = sorted(arms.switched)
    effect = _effect(arms) if odd else ""
    if not effect:
        return
    module = arms.reference.bench.module
    part = module.get_submodule(odd[0])
    now, built = ("eval", "train") if part.training else ("train", "eval")
    what = f"{odd[0]!r} ({type(part).__name__})" if odd[0] else "the model"
    what += f" and {len(odd) - 1} more modules" if odd[0] and len(odd) > 1 else ""
    text = f"{what} ran in {now} mode in update {arms.u}, where model() left {built} mode; {effect}"
    yield Diagnosis(Cause.MODE_CHANGED, text, update=arms.u)


def _effect(arms: UpdateArms) -> str:
    """What the modes change, in a clause; empty where they change nothing beyond rounding."""
    mine, built = arms.replay, arms.replayed(as_built=True)
    names = arms.names
    moved = [
        ratio(d, s)
        for d, s in zip(difference(mine.expected, built.expected), built.scale, strict=True)
    ]
    worst = max(range(len(moved)), key=moved.__getitem__)
    gradient = mine.expected[worst]
    dtype = arms.reference.bench.dtype
    elements = 0 if gradient is None else gradient.numel()
    allowed = replay_tolerance(arms.case.plan, dtype, elements, built.scale[worst])
    if not math.isnan(moved[worst]) and moved[worst] > allowed:
        return (
            f"in those, the gradient of {names[worst]!r} is {moved[worst]:.3g} of its scale "
            f"elsewhere, beyond rounding's {allowed:.3g}"
        )
    pairs = zip(mine.buffers, built.buffers, strict=True)
    return "" if all(all_same(a, b) for a, b in pairs) else "in those, other buffers are left"
