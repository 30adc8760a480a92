"""In which order cases are shown: failures first, the worst first, then a fixed order.

A margin cannot rank across precisions (float64 is always the worst), so among failures the finding
comes first, then the distance, then the margin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from equivtest.compare.figures import orderly
from equivtest.compare.verdict import Status, Verdict
from equivtest.report.record import Record

SYMBOLS = {
    Status.FAULT: "≠",
    Status.ERROR: "!",
    Status.UNEXPLAINED: "?",
    Status.INCONCLUSIVE: "∿",
    Status.EXPLAINED: "≈",
    Status.EQUIVALENT: "=",
    Status.NOT_RUN: "–",
}

MEANINGS = {
    Status.FAULT: "beside the plan, cause named",
    Status.ERROR: "could not finish",
    Status.UNEXPLAINED: "beyond tolerance, no cause",
    Status.INCONCLUSIVE: "no tensor could be judged",
    Status.EXPLAINED: "a known source, isolated",
    Status.EQUIVALENT: "the split is right",
    Status.NOT_RUN: "not possible here",
}

# Exact arithmetic first; not imported from equivtest.precision, which needs torch.
PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp16-mixed", "bf16-mixed")

_SEVERITY = tuple(SYMBOLS)


def fails(record: Record) -> bool:
    """Not as expected: what fails the test, and so not a case that could not be run here."""
    return not record.verdict.passed and record.verdict.status is not Status.NOT_RUN


def fixed_key(record: Record) -> tuple[object, ...]:
    """Experiment, loop, wrapper, precision, then plans by D, then A: the order of the matrix."""
    card = record.verdict.card
    return (
        record.experiment,
        record.loop,
        record.wrap,
        precision_rank(card.precision),
        card.D,
        card.A,
        plan_sizes(card.m),
        record.id,
    )


def precision_rank(precision: str) -> tuple[int, str]:
    """Place of a precision; one that is not known goes last, by name."""
    known = precision in PRECISIONS
    return (PRECISIONS.index(precision) if known else len(PRECISIONS), precision)


def plan_sizes(m: str) -> tuple[int, ...]:
    """``m`` of a card as numbers, so that 16 comes after 2."""
    return tuple(int(size) for size in m.split("+") if size.isdecimal())


def worst_first(records: Iterable[Record]) -> list[Record]:
    """All records: failures first, then what could not be run, then what passed."""
    return sorted(records, key=_badness)


def worst(records: Sequence[Record]) -> Record | None:
    """The first failure, or else the passing case nearest to its tolerance."""
    failing = [record for record in records if fails(record)]
    if failing:
        return worst_first(failing)[0]
    judged = [r for r in records if r.verdict.status is Status.EQUIVALENT and r.verdict.rows]
    ordered = sorted(judged, key=fixed_key)
    return max(ordered, key=lambda record: orderly(record.verdict.margin), default=None)


def largest_distance(verdict: Verdict) -> float:
    """The largest distance that is beyond its tolerance; 0 where there is none."""
    found = [f.distance for f in verdict.findings if f.distance is not None]
    for row in verdict.rows:
        if (row.replay_margin or 0) > 1 and row.replay_distance is not None:
            found.append(row.replay_distance)
        if (row.split_margin or 0) > 1 and row.split_distance is not None:
            found.append(row.split_distance)
    return max(map(orderly, found), default=0.0)


def _badness(record: Record) -> tuple[object, ...]:
    verdict = record.verdict
    failing = fails(record)
    return (
        not failing,
        verdict.passed,
        _SEVERITY.index(verdict.status) if failing else 0,
        -largest_distance(verdict) if failing else 0.0,
        -orderly(verdict.margin),
        fixed_key(record),
    )
