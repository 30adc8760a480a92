"""How often a loop may have called its scheduler at each update: the hypotheses. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from equivtest.causes import Cause


@dataclass(frozen=True)
class Moves:
    """A hypothesis on what moves the schedule.

    Attributes:
        causes: of a loop that moves it so.
        at: calls before each update; with the last, those when the loop ends.
        what: the hypothesis in a clause.
    """

    causes: tuple[Cause, ...]
    at: tuple[int, ...]
    what: str


@dataclass(frozen=True)
class Counted:
    """What a loop may count.

    Attributes:
        microbatches: of each update, as they were seen.
        applied: of each update.
        due: calls that are due at each update, and when the loop ends.
        unit: the experiment's.
        by_group: an update was attempted after each microbatch, and a schedule was moved.
    """

    microbatches: tuple[int, ...]
    applied: tuple[bool, ...]
    due: tuple[int, ...]
    unit: str
    D: int
    A: int = 1
    by_group: bool = False


def hypotheses(counts: Counted) -> list[Moves]:
    """What may move a schedule beside what is due, the simplest first."""
    due, D = counts.due, counts.D
    found = list(_by_group(counts))
    found += [
        Moves((Cause.SCHED_NEVER,), (0,) * len(due), "it never moves"),
        Moves(
            (Cause.SCHED_BEFORE_UPDATE,),
            (*(d + 1 for d in due[:-1]), due[-1]),
            "it moves before the update that it should follow",
        ),
        *_other_units(counts),
    ]
    if D > 1:
        own, many = (Cause.SCHED_PER_PROCESS,), f"it moves D={D} times"
        found.append(Moves(own, tuple(D * d for d in due), f"{many} where one call is due"))
        if counts.unit == "applied":
            at = tuple(D * u for u in range(len(due)))
            what = f"{many} per update, skipped or not"
            found.append(Moves((*own, Cause.STEPS_ON_SKIP), at, what))
    found += _per_microbatch(counts)
    return [moves for moves in found if moves.at != due]


def _by_group(counts: Counted) -> Iterator[Moves]:
    """As it is due; but updates, which are attempted after each microbatch, are not."""
    if counts.by_group:
        at = tuple(u // counts.A for u in range(len(counts.due)))
        what = "it moves with the plan's groups, and updates come after each microbatch"
        yield Moves((Cause.UPDATE_PER_MICROBATCH,), at, what)


def _other_units(counts: Counted) -> Iterator[Moves]:
    attempted = tuple(range(len(counts.due)))
    if counts.unit == "applied":
        what = "it moves with updates that were skipped"
        yield Moves((Cause.STEPS_ON_SKIP,), attempted, what)
        return
    applied = (0, *accumulate(map(int, counts.applied)))
    for unit, at in (("attempted", attempted), ("applied", applied)):
        if unit != counts.unit:
            what = f'it moves once per {unit} update, and scheduler_unit="{counts.unit}"'
            yield Moves((Cause.SCHED_WRONG_UNIT,), at, what)


def _per_microbatch(counts: Counted) -> Iterator[Moves]:
    """After each backward; at the end of each iteration, so after the update; or at once there."""
    if counts.unit == "microbatch" or max(counts.microbatches) < 2:
        return
    begun = tuple(accumulate(counts.microbatches))
    inside = ((*begun, begun[-1]), (*(b - 1 for b in begun), begun[-1]), (0, *begun))
    own = (Cause.SCHED_PER_MICROBATCH,)
    yield from (Moves(own, at, "it moves once per microbatch") for at in inside)
    if counts.D > 1:
        both, what = (*own, Cause.SCHED_PER_PROCESS), f"it moves D={counts.D} times per microbatch"
        yield from (Moves(both, tuple(counts.D * a for a in at), what) for at in inside)
