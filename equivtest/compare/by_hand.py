"""A clip that no hook saw: the gradient as it was before it, read from what the optimizer received.

A loop that clips by hand may divide or reduce by hand before. Where what it received is the plan's
gradient clipped, that is what it had. A clip by value leaves the elements within the bound, which
tell what was multiplied before; a clip by norm that is idle leaves everything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from equivtest.arms.replay import Replay
from equivtest.compare.clip import Clip
from equivtest.compare.continuity import all_same
from equivtest.compare.gradient import AgainstReplay
from equivtest.compare.norm_clip import HIDDEN, NormClip, Received
from equivtest.compare.tolerance import FORWARD_UNITS
from equivtest.compare.value_clip import ValueClip
from equivtest.distance import MaybeTensors, apart, multiple, times, total
from equivtest.observe.trace import UpdateTrace

Against = Callable[[Sequence[MaybeTensors], Replay], list[AgainstReplay]]
"""Comparison A of gradients by rank with a replay."""


@dataclass(frozen=True)
class ByHand:
    """An update whose gradient before a clip by hand is known.

    Attributes:
        a: comparison A of it, as the clip left it and the replay's.
        seen: the update by rank, with the gradient as it was before the clip.
        note: what could not be judged for it.
    """

    a: list[AgainstReplay]
    seen: list[UpdateTrace]
    note: str = ""


def by_hand(
    clip: Clip | None,
    seen: Sequence[UpdateTrace],
    names: Sequence[str],
    replay: Replay,
    against: Against,
    u: float,
) -> ByHand | None:
    """The update with the gradient that a clip by hand had; None where nothing tells it.

    Args:
        clip: the experiment's.
        names: of the parameters, by position.
        u: roundoff of the case's forwards, which a loop with a loss of its own may round otherwise
            than the replay: its gradient is then near, and the oracle decides.
    """
    if clip is None or any(clip.bound in update.clip_bounds for update in seen):
        return None
    received = [[update.clipped.get(name) for name in names] for update in seen]
    if isinstance(clip, ValueClip):
        return _by_value(clip, seen, names, received, replay, against)
    near = 0.0 if replay.shared else FORWARD_UNITS * u
    return _by_norm(clip, seen, names, received, replay, against, near)


def _by_value(
    clip: ValueClip,
    seen: Sequence[UpdateTrace],
    names: Sequence[str],
    received: Sequence[MaybeTensors],
    replay: Replay,
    against: Against,
) -> ByHand | None:
    before = [clip.multiplied(update) for update in seen]
    if all(one is not None for one in before):
        told = [
            u if g is None else replace(u, gradient=g) for u, g in zip(seen, before, strict=True)
        ]
        return ByHand(against([[u.gradient.get(n) for n in names] for u in told], replay), told)
    clamped = clip.received(seen[0], dict(zip(names, replay.expected, strict=True)))
    a = against(received, clamped.as_clipped(replay))
    sizes = zip(names, a, replay.scale, strict=True)
    allowed = {name: one.tolerance * scale for name, one, scale in sizes}
    if not all(one.within for one in a):
        return None
    if not all(clamped.holds(update.clipped, allowed) for update in seen):
        return None
    return ByHand(a, [clamped.before_clip(update) for update in seen], clamped.note)


def _by_norm(
    clip: NormClip,
    seen: Sequence[UpdateTrace],
    names: Sequence[str],
    received: Sequence[MaybeTensors],
    replay: Replay,
    against: Against,
    near: float,
) -> ByHand | None:
    first, plan = seen[0], dict(zip(names, replay.expected, strict=True))

    def read_as(told: Received) -> ByHand | None:
        a = against(received, told.as_clipped(replay))
        if not all(one.within or one.distance <= near for one in a):
            return None
        return ByHand(a, [told.before_clip(update) for update in seen], told.note)

    told = clip.received(first, plan)
    right = None if told is None else read_as(told)
    if right is not None or told is None or not _multiplied(first, clip):
        return right
    if total(replay.expected) <= clip.bound:  # idle on the plan's: what it received is its own
        own = [replace(update, gradient=update.clipped) for update in seen]
        return ByHand(against(received, replay), own)
    size = multiple(received[0], replay.expected)
    return read_as(Received(size, HIDDEN)) if size > 0 else None


def _multiplied(update: UpdateTrace, clip: NormClip) -> bool:
    """What was accumulated was multiplied by one number, and that is not the clip alone."""
    given, received = update.gradient, update.clipped
    if all_same(received, given) or clip.distance(update) <= clip.tolerance(update):
        return False
    number = multiple([received.get(n) for n in given], list(given.values()))
    return number > 0 and apart(received, times(given, number)) <= clip.tolerance(update)
