"""What became of the planted faults of a run: kind × experiment × plan × precision, as text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.compare.verdict import Status, Verdict
from equivtest.report.ranking import precision_rank
from equivtest.report.record import Record

NAMED, CAUGHT, MISSED, NOT_RUN = "named", "caught", "missed", "not run"

_ORDER = {str(cause): i for i, cause in enumerate(Cause)}


@dataclass(frozen=True)
class Outcome:
    """One case with a planted fault.

    Attributes:
        planted: the entry of the registry.
        outcome: ``named``: caught, with its cause and no other; ``caught``: the verdict is another
            than that on a right loop; ``missed``; or ``not run``.
        told: status and causes of the verdict.
        case: the record's id.
    """

    planted: str
    experiment: str
    plan: str
    precision: str
    outcome: str
    told: str
    case: str


def outcomes(records: Iterable[Record]) -> list[Outcome]:
    """Of the cases that ran a planted fault, in the order of the causes."""
    made = [
        Outcome(
            record.planted,
            record.experiment,
            record.verdict.card.plan,
            record.verdict.card.precision,
            _outcome(_cause(record.planted), record.verdict),
            _told(record.verdict),
            record.id,
        )
        for record in records
        if record.planted
    ]
    return sorted(made, key=_key)


def lines(found: Sequence[Outcome]) -> list[str]:
    """The table, what was not named, and the counts by precision."""
    precisions = sorted({one.precision for one in found}, key=precision_rank)
    rows: dict[tuple[str, str, str], dict[str, str]] = {}
    for one in found:
        cells = rows.setdefault((one.planted, one.experiment, one.plan), {})
        cells[one.precision] = one.outcome
    head = ["planted", "class", "experiment", "plan", *precisions]
    body = [
        [planted, kind_of(planted), experiment, plan, *(cells.get(p, "–") for p in precisions)]
        for (planted, experiment, plan), cells in rows.items()
    ]
    return [*_columns([head, *body]), *_others(found), *_counts(found, precisions)]


def _others(found: Sequence[Outcome]) -> list[str]:
    left = [one for one in found if one.outcome in (CAUGHT, MISSED)]
    told = [
        f"  {one.planted} in {one.experiment}, {one.plan}, {one.precision}: {one.told}"
        for one in left
    ]
    return ["", "not named:", *told] if told else []


def _counts(found: Sequence[Outcome], precisions: Sequence[str]) -> list[str]:
    rows = [["", "planted", "caught", "named"]]
    for precision in (*precisions, ""):
        ran = [
            one
            for one in found
            if one.outcome != NOT_RUN and (not precision or one.precision == precision)
        ]
        caught = sum(one.outcome in (CAUGHT, NAMED) for one in ran)
        named = sum(one.outcome == NAMED for one in ran)
        rows.append([precision or "all", str(len(ran)), str(caught), str(named)])
    return ["", *_columns(rows)]


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _outcome(cause: str, verdict: Verdict) -> str:
    if verdict.status is Status.NOT_RUN:
        return NOT_RUN
    if verdict.passed and cause in (*verdict.causes, *verdict.noted):
        return NAMED
    known = Cause.named(cause)
    quiet = known is not None and known.kind.quiet
    seen = bool(verdict.noted) if quiet else verdict.status is not Status.EQUIVALENT
    return CAUGHT if seen else MISSED


def _told(verdict: Verdict) -> str:
    named = ", ".join((*verdict.causes, *verdict.noted)) or "nothing named"
    return f"{verdict.status}, {named}"


def _cause(planted: str) -> str:
    return planted.partition("/")[0]


def kind_of(planted: str) -> str:
    """What kind of cause it is."""
    known = Cause.named(_cause(planted))
    return str(known.kind) if known else "–"


def _key(one: Outcome) -> tuple[int, str, str, str, tuple[int, str]]:
    at = _ORDER.get(_cause(one.planted), len(_ORDER))
    return at, one.planted, one.experiment, one.plan, precision_rank(one.precision)
