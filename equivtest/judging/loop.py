"""Comparison A of one update: the loop's own gradient against the replay.

On what the optimizer received where only that acquits; and without what a named cause did to it,
which others may add to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from equivtest.arms.replay import Replay
from equivtest.compare.arms import UpdateArms
from equivtest.compare.by_hand import by_hand
from equivtest.compare.clip import Clip
from equivtest.compare.gradient import AgainstReplay, against_replay
from equivtest.compare.value_clip import ValueClip
from equivtest.diagnose.addends import Addends
from equivtest.diagnose.clamping import clamped
from equivtest.diagnose.clip import early_note
from equivtest.diagnose.diagnosis import Corrected, Diagnosis
from equivtest.diagnose.precision import low_sums
from equivtest.distance import MaybeTensors
from equivtest.isolate.sums import in_another_order, reproduced
from equivtest.observe.trace import UpdateTrace


@dataclass(frozen=True)
class Loop:
    """The loop's gradient beside the replay's.

    Attributes:
        seen: the update by rank, with the gradient that is judged.
        gradients: by rank, in the order of the parameters' names, as they are judged.
        a: comparison A of them.
        received: the same as they were seen, and ``as_received`` comparison A of those: others
            where a named cause was taken out.
        diagnoses: causes that were taken out.
    """

    seen: list[UpdateTrace]
    gradients: Sequence[MaybeTensors]
    a: Sequence[AgainstReplay]
    received: Sequence[MaybeTensors]
    as_received: Sequence[AgainstReplay]
    diagnoses: tuple[Diagnosis, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def acquitted(self) -> bool:
        return all(one.within for one in self.a)

    @property
    def corrected(self) -> bool:
        """A named cause was taken out."""
        return self.a is not self.as_received


def held(arms: UpdateArms, seen: Sequence[UpdateTrace]) -> list[MaybeTensors]:
    """Gradients by rank, in the order of the parameters' names."""
    return [[update.gradient.get(name) for name in arms.names] for update in seen]


def loop_of(arms: UpdateArms, clip: Clip | None, left_out: frozenset[str]) -> Loop:
    """Compare the update's gradient with the replay's.

    Args:
        clip: the experiment's.
        left_out: names of parameters that are not judged.
    """

    def against(gradients: Sequence[MaybeTensors], replay: Replay) -> list[AgainstReplay]:
        found = zip(arms.names, against_replay(gradients, replay, arms.case.plan), strict=True)
        return [replace(one, skipped=name in left_out) for name, one in found]

    received = held(arms, arms.seen)
    a = against(received, arms.replay)
    loop = Loop(arms.seen, received, a, received, a)
    if loop.acquitted:
        return replace(loop, notes=tuple(_notes(arms, received)))
    clipped = by_hand(clip, arms.seen, arms.names, arms.replay, against, arms.case.precision.u)
    if clipped is not None:
        given = held(arms, clipped.seen)
        notes = (f"update {arms.u}: {clipped.note}",) if clipped.note else ()
        return Loop(clipped.seen, given, clipped.a, given, clipped.a, notes=notes)
    # What the loop's own order of a sum gives to the bit was not added up in another dtype.
    if reproduced(received, arms.replay, arms.case.plan.D):
        return loop
    for without in (_without_clamps, _without_low_sums):
        told = without(arms, clip, loop)
        if told is not None:
            loop = replace(
                loop,
                gradients=told.gradients,
                a=against(told.gradients, arms.replay),
                diagnoses=(*loop.diagnoses, told.diagnosis),
            )
    return loop


def _notes(arms: UpdateArms, gradients: Sequence[MaybeTensors]) -> Iterator[str]:
    """On a gradient that is right."""
    if arms.u == 0:  # hardly changes from update to update
        note = in_another_order(gradients[0], arms.replay, arms.names)
        yield from [note] if note else []
    yield from early_note(arms.seen[0])


def _without_clamps(arms: UpdateArms, clip: Clip | None, loop: Loop) -> Corrected | None:
    """Without what clips by value took away too early."""
    if not isinstance(clip, ValueClip):
        return None
    addends = Addends.of(arms.replayed(keep=True), loop.gradients[0])
    if addends is None:
        return None
    return clamped(arms.u, clip, addends, loop.seen, loop.gradients, loop.a, arms.names)


def _without_low_sums(arms: UpdateArms, _: Clip | None, loop: Loop) -> Corrected | None:
    """Without what sums in a low dtype lose, where the loop takes them."""
    if loop.acquitted:
        return None
    return low_sums(arms.u, loop.gradients, arms.replayed(keep=True), loop.seen)
