"""The fault table as the page shows it: kind × experiment × plan × precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from equivtest.compare import figures
from equivtest.compare.figures import ABSENT
from equivtest.report.planted import CAUGHT, MISSED, NAMED, NOT_RUN, Outcome, kind_of, outcomes
from equivtest.report.ranking import precision_rank
from equivtest.report.record import Record

SIGNS = {NAMED: "✓", CAUGHT: "○", MISSED: "✗", NOT_RUN: "–"}

_WORST_FIRST = (MISSED, CAUGHT, NAMED, NOT_RUN)


@dataclass(frozen=True)
class Cell:
    """One case; ``told`` is what was found where that is not the planted cause."""

    sign: str
    outcome: str
    told: str
    case: str


@dataclass(frozen=True)
class Row:
    """One experiment and plan: by precision a case, or None."""

    experiment: str
    plan: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Fault:
    """One planted fault: by precision how many were named of how many that ran; and each case.

    ``sign`` is of the worst that became of it, ``whole`` where there is nothing to look at.
    """

    planted: str
    kind: str
    counts: tuple[str, ...]
    sign: str
    whole: bool
    rows: tuple[Row, ...]

    def told(self, precisions: Sequence[str]) -> list[tuple[str, str]]:
        """Each precision in which it was planted, with its count."""
        pairs = zip(precisions, self.counts, strict=True)
        return [(precision, count) for precision, count in pairs if count != ABSENT]


@dataclass(frozen=True)
class FaultTable:
    """The table: ``totals`` are planted, caught and named by precision, all of them last."""

    title: str
    precisions: tuple[str, ...]
    totals: tuple[tuple[str, int, int, int], ...]
    faults: tuple[Fault, ...]


def fault_table(records: Iterable[Record]) -> FaultTable | None:
    """The table of a run; None where nothing was planted."""
    found = outcomes(records)
    if not found:
        return None
    precisions = tuple(sorted({one.precision for one in found}, key=precision_rank))
    by_planted = groupby(found, key=lambda one: one.planted)
    totals = [_total(precision, found) for precision in (*precisions, "")]
    _, planted, caught, named = totals[-1]
    return FaultTable(
        title=f"{figures.several(planted, 'case')} with a planted fault ran: {caught:,} caught, "
        f"{named:,} called by its name",
        precisions=precisions,
        totals=tuple(totals),
        faults=tuple(_fault(name, list(own), precisions) for name, own in by_planted),
    )


def _total(precision: str, found: Sequence[Outcome]) -> tuple[str, int, int, int]:
    counted = Counter(o.outcome for o in found if not precision or o.precision == precision)
    named = counted[NAMED]
    caught = named + counted[CAUGHT]
    return precision or "all", caught + counted[MISSED], caught, named


def _fault(planted: str, found: Sequence[Outcome], precisions: Sequence[str]) -> Fault:
    places: dict[tuple[str, str, int], dict[str, Outcome]] = {}
    before: Counter[tuple[str, str, str]] = Counter()
    for one in found:  # a second case of the same place has a row of its own
        again = before[one.experiment, one.plan, one.precision]
        before[one.experiment, one.plan, one.precision] += 1
        places.setdefault((one.experiment, one.plan, again), {})[one.precision] = one
    worst = next(o for o in _WORST_FIRST if any(one.outcome == o for one in found))
    return Fault(
        planted=planted,
        kind=kind_of(planted),
        counts=tuple(_count([o for o in found if o.precision == p]) for p in precisions),
        sign=SIGNS[worst],
        whole=worst in (NAMED, NOT_RUN),
        rows=tuple(
            Row(experiment, plan, tuple(_cell(cells.get(p)) for p in precisions))
            for (experiment, plan, _), cells in places.items()
        ),
    )


def _count(found: Sequence[Outcome]) -> str:
    ran = [one for one in found if one.outcome != NOT_RUN]
    if not ran:
        return "not run" if found else ABSENT
    named = sum(one.outcome == NAMED for one in ran)
    missed = sum(one.outcome == MISSED for one in ran)
    told = f"{named} of {len(ran)}"
    return f"{told}, {missed} missed" if missed else told


def _cell(one: Outcome | None) -> Cell | None:
    if one is None:
        return None
    told = "" if one.outcome in (NAMED, NOT_RUN) else one.told
    return Cell(SIGNS[one.outcome], one.outcome, told, one.case)
