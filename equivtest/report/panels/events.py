"""What each rank did, update by update, in order; and beside it when.

The order comes first, an event a mark, so that a reduction too many, too early or missing is seen
at a glance, whatever it took; ranks that did the same are told once. Times stand below, by rank.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from equivtest.compare import figures
from equivtest.compare.tables import EventRow
from equivtest.compare.verdict import Verdict

WIDTH = 100.0
"""Of the axis of time: places are in per cent."""

_TIMED_RANKS = 8
"""Ranks whose times are drawn; the first ones of more."""

_LEAST = 0.3
"""Per cent of the width that an event has at least, so that it is seen."""

_TOLD_UPDATES = 4
"""Updates whose reductions the title tells one by one."""


@dataclass(frozen=True)
class Kind:
    """How a kind of event is shown.

    Attributes:
        mark: in a lane.
        letter: beside a line of source; empty for what comes with another kind.
        meaning: in a legend.
    """

    name: str
    mark: str
    letter: str
    meaning: str

    @property
    def css(self) -> str:
        return self.name.rpartition(" ")[2]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("forward", "F", "F", "forward, with the number of its microbatch"),
        Kind("backward", "B", "B", "backward"),
        Kind("collective", "reduce", "R", "gradients meet over replicas"),
        Kind("broadcast", "broadcast", "", "buffers from rank 0"),
        Kind("unscale", "unscale", "U", "loss scale taken out"),
        Kind("clip", "clip", "C", "gradients clipped"),
        Kind("update attempted", "◇ update", "◇", "update attempted"),
        Kind("update applied", "◆ applied", "", "applied"),
        Kind("update skipped", "✕ skipped", "", "skipped"),
        Kind("scheduler", "scheduler", "S", "learning rate moved"),
        Kind("scaler update", "scaler", "", "loss scale moved"),
        Kind("average", "average", "A", "average of weights moved"),
        Kind("zero_grad", "zero", "Z", "gradients cleared"),
    )
}
"""By name, in the order of an update."""


def kind_of(name: str) -> Kind:
    """The kind of that name; one that is not known is shown by it."""
    return KINDS.get(name, Kind(name, name, "", ""))


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
        return f"{kind_of(self.kind).mark}{number}"

    @property
    def text(self) -> str:
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{self.kind}{of}" + (f", {self.detail}" if self.detail else "")

    @property
    def css(self) -> str:
        return kind_of(self.kind).css


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
    kinds: tuple[Kind, ...]
    lanes: tuple[Lane, ...]
    times: tuple[Times, ...]


def events(verdict: Verdict) -> Events | None:
    """The figure of a case; None where no rank left an event."""
    if not verdict.events:
        return None
    told = tuple(lanes(verdict.events))
    timed = list(dict.fromkeys(lane.update for lane in told))
    seen = {event.kind for event in verdict.events}
    return Events(
        title=title(told),
        kinds=tuple(kind for name, kind in KINDS.items() if name in seen),
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
    parts = [_reductions(by_update)]
    whole = {u: [_outcome(lane) for lane in same] for u, same in by_update.items()}
    skipped = [u for u, found in whole.items() if "skipped" in found]
    unattempted = [u for u, found in whole.items() if "not attempted" in found]
    open_ = [u for u, found in whole.items() if "attempted" in found]
    if not skipped and not unattempted and not open_:
        parts.append("every update applied")
    parts += [f"{_updates(skipped)} skipped"] if skipped else []
    parts += [f"no update attempted in {_updates(unattempted)}"] if unattempted else []
    parts += [f"{_updates(open_)} attempted and not seen to end"] if open_ else []
    apart = [u for u, same in by_update.items() if len(same) > 1]
    parts += [f"ranks differ in {_updates(apart)}"] if apart else []
    return ", ".join(parts)


def _outcome(lane: Lane) -> str:
    """What became of the update on these ranks; with several optimizers the worst of it."""
    if _has(lane, "update skipped"):
        return "skipped"
    if _has(lane, "update applied"):
        return "applied"
    return "attempted" if _has(lane, "update attempted") else "not attempted"


def _reductions(by_update: Mapping[int, Sequence[Lane]]) -> str:
    every = {u: {_count(lane, "collective") for lane in same} for u, same in by_update.items()}
    first = next(iter(every.values()))
    if all(counts == {0} for counts in every.values()):
        return "no reduction"
    if first == {1} and all(counts == first for counts in every.values()):
        late = all(_reduces_last(lane) for same in by_update.values() for lane in same)
        return "one reduction an update" + (", at its last backward" if late else "")
    if len(first) == 1 and all(counts == first for counts in every.values()):
        return f"{first.pop()} reductions an update"
    told = [f"{_several(counts)} in update {u}" for u, counts in every.items()]
    return ", ".join([*told[:_TOLD_UPDATES], *(["…"] if len(told) > _TOLD_UPDATES else [])])


def _several(counts: Collection[int]) -> str:
    low, high = min(counts), max(counts)
    if low < high:
        return f"{low} to {high} reductions"
    return figures.several(low, "reduction") if low else "none"


def _reduces_last(lane: Lane) -> bool:
    """Right after a backward, and none comes later."""
    kinds = [mark.kind for mark in lane.marks]
    at = kinds.index("collective")
    return kinds[max(at - 1, 0)] == "backward" and "backward" not in kinds[at:]


def _count(lane: Lane, kind: str) -> int:
    return sum(mark.times for mark in lane.marks if mark.kind == kind)


def _has(lane: Lane, kind: str) -> bool:
    return any(mark.kind == kind for mark in lane.marks)


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
    by_rank: dict[int, list[EventRow]] = {}
    for event in verdict.events:
        if event.update == update:
            by_rank.setdefault(event.rank, []).append(event)
    at = [event.at_s for own in by_rank.values() for event in own]
    lasted = max(at) - min(at)
    if not (0 < lasted < math.inf) or not all(map(math.isfinite, at)):
        return None
    drawn = sorted(by_rank.items())[:_TIMED_RANKS]
    names = [f"rank {rank}" for rank, _ in drawn]
    if len(by_rank) > len(drawn):
        names[-1] += f", the last shown of {len(by_rank)}"
    spans = [tuple(_spans(own, min(at), WIDTH / lasted)) for _, own in drawn]
    return Times(update, figures.duration(lasted), tuple(zip(names, spans, strict=True)))


def _spans(rows: Sequence[EventRow], begun: float, scale: float) -> Iterable[Span]:
    """Each event lasts until the next of its rank."""
    for event, after in zip(rows, [*rows[1:], rows[-1]], strict=True):
        mark = Mark(event.kind, event.microbatch, event.detail)
        lasted = max(after.at_s - event.at_s, 0.0)
        yield Span(
            round(min((event.at_s - begun) * scale, WIDTH - _LEAST), 2),
            round(max(lasted * scale, _LEAST), 2),
            mark.css,
            f"{mark.text}: {figures.duration(lasted)}",
        )
