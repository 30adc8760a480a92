"""A clip that no hook saw: what the optimizer received, judged as the plan's gradient clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from equivtest.arms.replay import Replay
from equivtest.compare.clip import Clip
from equivtest.compare.gradient import AgainstReplay
from equivtest.compare.tolerance import FORWARD_UNITS
from equivtest.compare.value_clip import Clamped
from equivtest.distance import MaybeTensors
from equivtest.observe.trace import UpdateTrace

Against = Callable[[Sequence[MaybeTensors], Replay], list[AgainstReplay]]
"""Comparison A of gradients by rank with a replay."""


@dataclass(frozen=True)
class ByHand:
    """An update that a clip by hand acquits.

    Attributes:
        a: comparison A with the replay as the clip would have left it.
        seen: the update by rank, with the gradient as it was before the clip.
        note: what could not be judged for it.
    """

    a: list[AgainstReplay]
    seen: list[UpdateTrace]
    note: str


def by_hand(
    clip: Clip | None,
    seen: Sequence[UpdateTrace],
    names: Sequence[str],
    replay: Replay,
    against: Against,
    u: float,
) -> ByHand | None:
    """What the optimizer received, if that acquits and no clip was seen.

    Args:
        clip: the experiment's.
        names: of the parameters, by position.
        u: roundoff of the case's forwards, which a loop with a loss of its own may round otherwise
            than the replay: its gradient is then near, and the oracle decides.
    """
    if clip is None or any(clip.bound in update.clip_bounds for update in seen):
        return None
    told = clip.received(seen[0], dict(zip(names, replay.expected, strict=True)))
    if told is None:
        return None
    clipped = [[update.clipped.get(name) for name in names] for update in seen]
    a = against(clipped, told.as_clipped(replay))
    near = 0.0 if replay.shared else FORWARD_UNITS * u
    if not all(one.within or one.distance <= near for one in a):
        return None
    if isinstance(told, Clamped):
        sizes = zip(names, a, replay.scale, strict=True)
        allowed = {name: one.tolerance * scale for name, one, scale in sizes}
        if not all(told.holds(update.clipped, allowed) for update in seen):
            return None
    return ByHand(a, [told.before_clip(update) for update in seen], told.note)
