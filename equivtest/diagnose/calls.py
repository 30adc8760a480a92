"""Where in a group the loop called something: between its microbatches, or after its update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.observe.trace import Event, Trace


@dataclass(frozen=True)
class Call:
    """One call.

    Attributes:
        update: the update that was open, or had just been attempted.
        begun: microbatches of its group that had begun.
        attempted: the update had been attempted.
    """

    update: int
    begun: int
    attempted: bool


def calls(trace: Trace, kind: str) -> list[Call]:
    """Calls that left an event of this kind, in order."""
    return _placed(trace.events, kind)


def _placed(events: Sequence[Event], kind: str) -> list[Call]:
    found: list[Call] = []
    update, begun, attempted = 0, 0, False
    for event in events:
        if event.update != update:
            update, begun, attempted = event.update, 0, False
        if event.kind == "forward":
            begun = max(begun, (event.microbatch or 0) + 1)
        attempted |= event.kind == "update attempted"
        if event.kind == kind:
            found.append(Call(update, begun, attempted))
    return found
