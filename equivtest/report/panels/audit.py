"""Which examples each microbatch received, duplicates and omissions marked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.tables import ExampleRow
from equivtest.compare.verdict import Verdict

_MOST_IDS = 24
"""Ids of one microbatch that are written; of more the first ones."""

_NAMED = 16


@dataclass(frozen=True)
class Ids:
    """Those of one microbatch: each run with whether it came too often."""

    runs: tuple[tuple[str, bool], ...]
    supervised: str
    elsewhere: bool


@dataclass(frozen=True)
class Line:
    """One replica in one update."""

    update: int
    replica: str
    microbatches: tuple[Ids, ...]


@dataclass(frozen=True)
class Audit:
    """The table: ``surplus`` and ``lacking`` name what came more and less often than planned."""

    title: str
    microbatches: int
    lines: tuple[Line, ...]
    surplus: str
    lacking: str
    elsewhere: bool


def audit(verdict: Verdict) -> Audit | None:
    """The audit of a case; None where no forward was seen."""
    rows = verdict.examples
    if not rows:
        return None
    planned = Counter(i for row in rows for i in row.planned or ())
    received = Counter(i for row in rows for i in row.ids or ())
    unknown = sum(row.ids is None for row in rows)
    surplus = sorted((received - planned).elements())
    lacking = sorted((planned - received).elements()) if not unknown else []
    counted = {
        (m.update, m.replica, m.microbatch): figures.quantity(m.supervised)
        for m in verdict.microbatches
        if m.supervised is not None
    }
    lines = _lines(rows, set(surplus), counted)
    return Audit(
        title=_title(rows, planned, received, len(surplus), len(lacking), unknown),
        microbatches=max(len(line.microbatches) for line in lines),
        lines=lines,
        surplus=_named(surplus),
        lacking=_named(lacking),
        elsewhere=any(ids.elsewhere for line in lines for ids in line.microbatches),
    )


def runs(ids: Sequence[int], marked: Iterable[int] = ()) -> list[tuple[str, bool]]:
    """Ids in their order, neighbours that follow each other as one: ``0–3``, ``7``."""
    often = set(marked)
    found: list[list[int]] = []
    for one in ids:
        last = found[-1] if found else None
        if last and one == last[-1] + 1 and (one in often) == (last[-1] in often):
            last.append(one)
        else:
            found.append([one])
    return [
        (f"{run[0]}" if len(run) == 1 else f"{run[0]}–{run[-1]}", run[0] in often) for run in found
    ]


def _title(
    rows: Sequence[ExampleRow],
    planned: Counter[int],
    received: Counter[int],
    surplus: int,
    lacking: int,
    unknown: int,
) -> str:
    if unknown == len(rows):
        return "which examples came is not known"
    if not planned and not received:
        return "none planned, none received"
    known = f"{planned.total():,} planned, {received.total():,} received"
    parts = [
        f"{surplus:,} more often than planned" if surplus else "",
        f"{lacking:,} less often" if lacking else "",
    ]
    often = ", ".join(filter(None, parts))
    if unknown:
        told = f"{known}, unknown in {unknown} of {len(rows)} microbatches"
        return f"{told}: {often}" if often else told
    if surplus or lacking:
        return f"{known}: {often}"
    once = "each once" if set(received.values()) == {1} else "each as often as planned"
    return f"{known}, {once}"


def _lines(
    rows: Sequence[ExampleRow], surplus: set[int], counted: dict[tuple[int, int, int], str]
) -> tuple[Line, ...]:
    by_place: dict[tuple[int, int], list[Ids]] = {}
    for row in sorted(rows, key=lambda r: (r.update, r.replica, r.microbatch)):
        supervised = counted.get((row.update, row.replica, row.microbatch), "")
        by_place.setdefault((row.update, row.replica), []).append(_ids(row, surplus, supervised))
    return tuple(
        Line(update, f"replica {replica}", tuple(ids))
        for (update, replica), ids in by_place.items()
    )


def _ids(row: ExampleRow, surplus: set[int], supervised: str) -> Ids:
    if row.ids is None:
        return Ids((("unknown", False),), supervised, False)
    shown = runs(row.ids[:_MOST_IDS], surplus)
    if len(row.ids) > _MOST_IDS:
        shown.append((f"… {len(row.ids)} in all", False))
    elsewhere = sorted(row.ids) != sorted(row.planned or ())
    return Ids(tuple(shown) or (("none", False),), supervised, elsewhere)


def _named(ids: Sequence[int]) -> str:
    distinct = sorted(set(ids))
    named = ", ".join(text for text, _ in runs(distinct)[:_NAMED])
    return f"{named}, …" if len(runs(distinct)) > _NAMED else named
