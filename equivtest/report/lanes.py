"""What each rank did, update by update; ranks that did the same are told once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.tables import EventRow


@dataclass(frozen=True)
class Mark:
    """One event, or several equal ones in a row."""

    kind: str
    microbatch: int | None
    detail: str
    times: int = 1


@dataclass(frozen=True)
class Lane:
    """The events of one update on ranks that did the same."""

    update: int
    ranks: str
    marks: tuple[Mark, ...]


def lanes(events: Sequence[EventRow]) -> list[Lane]:
    """Lanes in order of update, then of the lowest rank."""
    by_place: dict[tuple[int, int], list[EventRow]] = {}
    for event in events:
        by_place.setdefault((event.update, event.rank), []).append(event)
    alike: dict[tuple[int, tuple[Mark, ...]], list[int]] = {}
    for (update, rank), happened in sorted(by_place.items()):
        alike.setdefault((update, _marks(happened)), []).append(rank)
    return [
        Lane(update, figures.rank_names(ranks), marks) for (update, marks), ranks in alike.items()
    ]


def _marks(events: Sequence[EventRow]) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for event in events:
        mark = Mark(event.kind, event.microbatch, event.detail)
        last = marks[-1] if marks else None
        if last is not None and (last.kind, last.microbatch, last.detail) == (
            mark.kind,
            mark.microbatch,
            mark.detail,
        ):
            marks[-1] = Mark(mark.kind, mark.microbatch, mark.detail, last.times + 1)
        else:
            marks.append(mark)
    return tuple(marks)
