"""The clip of an update against the experiment's, on the candidate's own gradient."""

from __future__ import annotations

from collections.abc import Iterator

from equivtest.causes import Cause
from equivtest.compare.continuity import all_same, same_values
from equivtest.compare.norm_clip import NormClip
from equivtest.compare.value_clip import ValueClip
from equivtest.compare.verdict import Finding
from equivtest.distance import apart, dense, multiple
from equivtest.experiment import Experiment
from equivtest.observe.trace import UpdateTrace

Clip = NormClip | ValueClip

SAME = 1e-5
"""How near a multiple of the clipped gradient must be to be called one."""


def clip_of(experiment: Experiment, device: str = "cpu") -> Clip | None:
    """How the experiment clips; replayed on ``device``."""
    if experiment.clip_norm is not None:
        return NormClip(experiment.clip_norm, device)
    return None if experiment.clip_value is None else ValueClip(experiment.clip_value)


def judge_clip(u: int, update: UpdateTrace, clip: Clip | None) -> Iterator[Finding]:
    """What the optimizer received in update ``u`` against what ``clip`` makes of the gradient."""
    untouched = all_same(update.clipped, update.gradient)
    if clip is None:
        if not untouched:
            yield Finding(
                Cause.CLIP,
                f"the gradient changed between its reduction and update {u}, and the experiment "
                "does not clip (clip_norm= and clip_value= say that it does)",
                update=u,
            )
        return
    off, allowed = clip.distance(update), clip.tolerance(update)
    missing = untouched and not update.clip_bounds and clip.active(update)
    if off <= allowed and not missing:
        return
    yield Finding(
        Cause.CLIP_MISSING if missing else Cause.CLIP,
        f"{clip.size(update)} before update {u}, the bound {clip.bound:g}, and "
        + ("it was not clipped" if missing else _otherwise(update, clip, off)),
        update=u,
        distance=off,
        tolerance=allowed,
    )


def _otherwise(update: UpdateTrace, clip: Clip, off: float) -> str:
    """What is seen of a clip that left something else.

    Args:
        off: how far from the clipped gradient, relative to its norm.
    """
    bounds = sorted(set(update.clip_bounds))
    told = []
    if update.clipped_scaled:
        told.append("the clip was called before unscale")
    elif bounds and bounds != [clip.bound]:
        told.append(f"the loop's clip had the bound {', '.join(f'{b:g}' for b in bounds)}")
    held = [n for n, g in update.gradient.items() if g is not None]
    left = [n for n in held if same_values(update.clipped.get(n), update.gradient[n])]
    if 0 < len(left) < len(held):
        told.append(f"{len(left)} of {len(held)} tensors were not touched ({left[0]!r} first)")
    if not any(g is not None and g.any() for g in update.clipped.values()):
        told.append("nothing but zeros reached the optimizer: gradients were cleared before it")
    told.append(f"what the optimizer received is {_relation(update, clip, off)}")
    return "; ".join(told)


def _relation(update: UpdateTrace, clip: Clip, off: float) -> str:
    wanted, received = clip.clipped(update.gradient), update.clipped
    times = multiple(list(received.values()), list(wanted.values()))
    scaled = {n: None if g is None else dense(g) * times for n, g in wanted.items()}
    if times and apart(received, scaled) <= clip.tolerance(update) + SAME:
        how = ": it was multiplied after the clip" if update.clip_bounds else ""
        return f"{times:.6g} times the clipped gradient{how}"
    return f"{off:.3g} of its norm away from the clipped gradient"
