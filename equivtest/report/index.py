"""The index: cases of one experiment, loop, precision and verdict in a row, the worst first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.figures import orderly
from equivtest.compare.prose import deciding, headline, margin_text
from equivtest.compare.verdict import Status
from equivtest.report.identity import DEFAULT_WRAP
from equivtest.report.ranking import fails, worst_first
from equivtest.report.record import Record


@dataclass(frozen=True)
class IndexRow:
    """One row; its figures are of ``worst``, ``order`` is what its margin sorts by.

    ``expected`` says whether the verdict is, ``words`` are for the filter beside what is shown.
    """

    status: Status
    expected: str
    over: bool
    experiment: str
    loop: str
    precision: str
    cases: int
    plans: str
    worst: Record
    margin: str
    order: float
    distance: str
    distance_order: float
    tolerance: str
    floor: str
    told: str
    words: str


def index(records: Sequence[Record]) -> list[IndexRow]:
    """All cases, in rows."""
    ran: dict[tuple[str, ...], set[str]] = {}
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in worst_first(records):
        verdict = record.verdict
        place = (record.experiment, record.loop, record.wrap, verdict.card.precision)
        ran.setdefault(place, set()).add(verdict.card.plan)
        key = (*place, verdict.status, fails(record), verdict.causes)
        groups.setdefault(key, []).append(record)
    return [_row(cases, ran) for cases in groups.values()]


def _row(cases: Sequence[Record], ran: dict[tuple[str, ...], set[str]]) -> IndexRow:
    worst = cases[0]
    verdict, row = worst.verdict, worst.verdict.worst
    place = (worst.experiment, worst.loop, worst.wrap, verdict.card.precision)
    plans = dict.fromkeys(record.verdict.card.plan for record in cases)
    loop = worst.loop if worst.wrap == DEFAULT_WRAP else f"{worst.loop}, {worst.wrap}"
    _, distance, tolerance = deciding(row) if row else ("", None, None)
    judged = any(one.state != "not judged" for one in verdict.rows)
    return IndexRow(
        status=verdict.status,
        expected=_expected(worst),
        over=fails(worst) and not verdict.margin <= 1,
        experiment=worst.experiment,
        loop=loop,
        precision=verdict.card.precision,
        cases=len(cases),
        plans=_plans(list(plans), len(ran[place])),
        worst=worst,
        margin=margin_text(verdict),
        order=_finite(verdict.margin) if judged else -1.0,
        distance=figures.distance(distance),
        distance_order=_finite(distance) if distance is not None else -1.0,
        tolerance=figures.distance(tolerance),
        floor=figures.distance(row.noise_floor if row else None),
        told=_told(worst),
        words=" ".join(dict.fromkeys([*plans, worst.planted, *said(worst)])).strip(),
    )


def _plans(plans: Sequence[str], ran: int) -> str:
    if len(plans) == ran:
        return "all plans" if ran > 1 else plans[0]
    return f"{len(plans)} of {ran} plans" if len(plans) > 1 else plans[0]


def _told(record: Record) -> str:
    """Why there is no cause, where there is none to name."""
    verdict = record.verdict
    if verdict.causes or verdict.status is Status.EQUIVALENT:
        return ""
    text = headline(verdict)
    return text if len(text) <= 90 else f"{text[:88].rstrip()} …"


def _expected(record: Record) -> str:
    if fails(record):
        return "✗ no"
    return "✓ yes" if record.verdict.passed else figures.ABSENT


def said(record: Record) -> list[str]:
    """What was found, for the filter."""
    return [finding.text for finding in record.verdict.findings[:1]]


def _finite(value: float) -> float:
    """A number that HTML and script sort alike."""
    return min(orderly(value), 1e308)
