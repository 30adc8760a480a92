"""What each rank did, update by update, in order; and beside it when.

The order comes first, an event a mark, so that a reduction too many, too early or missing is seen
at a glance, whatever it took; ranks that did the same are told once. Times stand below, by rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from equivtest.compare import figures
from equivtest.compare.tables import EventRow
from equivtest.compare.verdict import Verdict

WIDTH = 100.0
"""Of the axis of time: places are in per cent."""

_TIMED_RANKS = 8
"""Ranks whose times are drawn; the first ones of more."""

SHORT = {
    "forward": "F",
    "backward": "B",
    "collective": "reduce",
    "update attempted": "◇ update",
    "update applied": "◆ applied",
    "update skipped": "✕ skipped",
    "scaler update": "scaler",
    "zero_grad": "zero",
}
"""How a kind is written on its mark; others by their own name."""

MEANINGS = (
    ("F0", "forward", "forward of microbatch 0"),
    ("B0", "backward", "backward"),
    ("reduce", "collective", "gradients meet over replicas"),
    ("broadcast", "broadcast", "buffers from rank 0"),
    ("unscale", "unscale", "loss scale taken out"),
    ("clip", "clip", "gradients clipped"),
    ("◇ update", "update attempted", "attempted"),
    ("◆ applied", "update applied", "applied"),
    ("✕ skipped", "update skipped", "skipped"),
    ("scheduler", "scheduler", "learning rate moved"),
    ("scaler", "scaler update", "loss scale moved"),
    ("average", "average", "average of weights updated"),
    ("zero", "zero_grad", "gradients cleared"),
)
"""Sign, kind and meaning, in the order of an update."""


@dataclass(frozen=True)
class Mark:
    """One event, or several equal ones in a row."""

    kind: str
    microbatch: int | None
    detail: str
    times: int = 1

    @property
    def label(self) -> str:
        number = "" if self.microbatch is None or self.kind == "collective" else self.microbatch
        return f"{SHORT.get(self.kind, self.kind)}{number}"

    @property
    def text(self) -> str:
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{self.kind}{of}" + (f", {self.detail}" if self.detail else "")

    @property
    def css(self) -> str:
        return self.kind.rpartition(" ")[2]


@dataclass(frozen=True)
class Lane:
    """The events of one update on ranks that did the same."""

    update: int
    ranks: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Span:
    """A stretch of time on one rank; places in per cent."""

    x: float
    width: float
    css: str
    text: str


@dataclass(frozen=True)
class Times:
    """When the ranks did it, in one update: for each rank its spans, the last time at the right."""

    update: int
    duration: str
    ranks: tuple[tuple[str, tuple[Span, ...]], ...]


@dataclass(frozen=True)
class Events:
    """The figure."""

    title: str
    meanings: tuple[tuple[str, str, str], ...]
    lanes: tuple[Lane, ...]
    times: tuple[Times, ...]


def events(verdict: Verdict) -> Events | None:
    """The figure of a case; None where no rank left an event."""
    if not verdict.events:
        return None
    told = tuple(lanes(verdict.events))
    timed = list(dict.fromkeys(lane.update for lane in told))
    kinds = {event.kind for event in verdict.events}
    return Events(
        title=title(told),
        meanings=tuple(one for one in MEANINGS if one[1] in kinds),
        lanes=told,
        times=tuple(filter(None, (_times(verdict, u) for u in timed))),
    )


def lanes(rows: Sequence[EventRow]) -> list[Lane]:
    """Lanes in order of update, then of the lowest rank."""
    by_place: dict[tuple[int, int], list[EventRow]] = {}
    for event in rows:
        by_place.setdefault((event.update, event.rank), []).append(event)
    alike: dict[tuple[int, tuple[Mark, ...]], list[int]] = {}
    for (update, rank), happened in sorted(by_place.items()):
        alike.setdefault((update, _marks(happened)), []).append(rank)
    return [
        Lane(update, figures.rank_names(ranks), marks) for (update, marks), ranks in alike.items()
    ]


def title(told: Sequence[Lane]) -> str:
    """What the lanes show: reductions, updates, and whether ranks differ."""
    by_update = {u: list(same) for u, same in groupby(told, key=lambda lane: lane.update)}
    apart = [u for u, same in by_update.items() if len(same) > 1]
    parts = [_reductions(by_update)]
    skipped = [u for u, same in by_update.items() if any(_has(lane, "skipped") for lane in same)]
    unattempted = [
        u for u, same in by_update.items() if not any(_has(lane, "attempted") for lane in same)
    ]
    if skipped:
        parts.append(f"{_updates(skipped)} skipped")
    elif not unattempted:
        parts.append("every update applied")
    if unattempted:
        parts.append(f"no update attempted in {_updates(unattempted)}")
    if apart:
        parts.append(f"ranks differ in {_updates(apart)}")
    return ", ".join(parts)


def _reductions(by_update: Mapping[int, Sequence[Lane]]) -> str:
    counts = {u: max(_count(lane, "collective") for lane in same) for u, same in by_update.items()}
    if not any(counts.values()):
        return "no reduction"
    if set(counts.values()) == {1}:
        late = all(_reduces_last(lane) for same in by_update.values() for lane in same)
        return "one reduction an update" + (", at its last backward" if late else "")
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values()))} reductions an update"
    return ", ".join(
        f"{figures.several(n, 'reduction') if n else 'none'} in update {u}"
        for u, n in list(counts.items())[:4]
    )


def _reduces_last(lane: Lane) -> bool:
    kinds = [mark.kind for mark in lane.marks]
    if "collective" not in kinds:
        return True
    return "backward" not in kinds[kinds.index("collective") :]


def _count(lane: Lane, kind: str) -> int:
    return sum(mark.times for mark in lane.marks if mark.kind == kind)


def _has(lane: Lane, word: str) -> bool:
    return any(mark.css == word for mark in lane.marks)


def _updates(numbers: Sequence[int]) -> str:
    return f"update{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _marks(rows: Sequence[EventRow]) -> tuple[Mark, ...]:
    marks: list[Mark] = []
    for event in rows:
        mark = Mark(event.kind, event.microbatch, event.detail)
        if marks and replace(marks[-1], times=1) == mark:
            marks[-1] = replace(mark, times=marks[-1].times + 1)
        else:
            marks.append(mark)
    return tuple(marks)


def _times(verdict: Verdict, update: int) -> Times | None:
    """None where the record has no times."""
    rows = [event for event in verdict.events if event.update == update]
    begun, ended = min(e.at_s for e in rows), max(e.at_s for e in rows)
    if ended <= begun:
        return None
    scale = WIDTH / (ended - begun)
    ranks = [(rank, list(own)) for rank, own in groupby(rows, key=lambda e: e.rank)]
    return Times(
        update,
        figures.duration(ended - begun),
        tuple(
            (f"rank {rank}", tuple(_spans(own, begun, scale))) for rank, own in ranks[:_TIMED_RANKS]
        ),
    )


def _spans(rows: Sequence[EventRow], begun: float, scale: float) -> Iterable[Span]:
    """Each event lasts until the next of its rank."""
    for event, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        mark = Mark(event.kind, event.microbatch, event.detail)
        lasted = after.at_s - event.at_s
        yield Span(
            round((event.at_s - begun) * scale, 2),
            round(max(lasted * scale, 0.3), 2),
            mark.css,
            f"{mark.text}: {figures.duration(lasted)}",
        )
