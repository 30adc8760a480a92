"""A case over several runs: how its margin went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare.verdict import Status
from equivtest.report.record import Record


@dataclass(frozen=True)
class Point:
    """A case in one run.

    Attributes:
        run_id: the run's folder.
        status: what the verdict said there.
        margin: of the verdict, in tolerances; NaN where nothing was judged.
    """

    run_id: str
    status: Status
    margin: float


def histories(runs: Sequence[tuple[str, Sequence[Record]]]) -> dict[str, tuple[Point, ...]]:
    """By case id, a point for each run that has the case; none of a case that only one run has.

    Args:
        runs: the name and the records of each, the oldest first, as the points are then.
    """
    found: dict[str, list[Point]] = {}
    for run_id, records in runs:
        for record in records:
            point = Point(run_id, record.verdict.status, record.verdict.margin)
            found.setdefault(record.id, []).append(point)
    return {case: tuple(points) for case, points in found.items() if len(points) > 1}
