"""Two runs of the same cases: which verdicts changed, which margins moved, what else is new."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from equivtest.compare.figures import orderly
from equivtest.compare.prose import deciding, headline
from equivtest.compare.verdict import Status, Verdict
from equivtest.report.environment import Difference, differences
from equivtest.report.ranking import fails, fixed_key, worst_first
from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.summary import notices

LEAST_NOISE = 0.25
"""Tolerances that a right run's margin may move by rounding alone: a tolerance is kappa = 4 noise
floors (``Precision.kappa``), and another order of sums or another machine moves a distance by up to
one. Not imported from equivtest.precision, which needs torch."""

FAULTY_NOISE = 0.1
"""Beyond the tolerance, the part of a margin that says nothing new: the tolerance of C follows a
measured floor, which another machine measures otherwise, and the fault's distance is the same."""


class Change(StrEnum):
    """How a verdict changed, in the order to show it."""

    WORSE = "worse"
    NOW_RUN = "run now"
    NOT_RUN = "not run any more"
    OTHER = "other"
    BETTER = "better"


@dataclass(frozen=True)
class Changed:
    """A case with another verdict than before."""

    change: Change
    old: Record
    new: Record


@dataclass(frozen=True)
class Moved:
    """A case with the same verdict and another margin.

    Attributes:
        noise: tolerances by which the margin may have moved for no reason.
    """

    old: Record
    new: Record
    noise: float

    @property
    def rose(self) -> bool:
        """Nearer to the tolerance, or further beyond it."""
        return orderly(self.new.verdict.margin) > orderly(self.old.verdict.margin)


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs.

    Attributes:
        old, new: the runs; ``missing`` of each are its tests that left no record.
        changed: verdicts that changed, the worse first, then by how much the margin moved.
        moved: margins that moved beside the same verdict, those that rose first, the most first.
        gone, added: cases of the old run alone and of the new run alone, the worst first.
        environment: properties that differ.
        notes: what limits the comparison, in sentences.
    """

    old: Run
    new: Run
    changed: tuple[Changed, ...] = ()
    moved: tuple[Moved, ...] = ()
    gone: tuple[Record, ...] = ()
    added: tuple[Record, ...] = ()
    environment: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def matched(self) -> int:
        """Cases that both runs have."""
        return len(self.old.records) - len(self.gone)

    @property
    def unchanged(self) -> int:
        """Cases of both runs with the same verdict, and a margin within noise."""
        return self.matched - len(self.changed) - len(self.moved)

    @property
    def counts(self) -> dict[Change, int]:
        """Changed verdicts by kind, in the order to show them; 0 where there is none."""
        return {kind: sum(case.change is kind for case in self.changed) for kind in Change}

    @property
    def same(self) -> bool:
        """No verdict changed, no margin moved, no case was added or is gone."""
        return not (self.changed or self.moved or self.gone or self.added)


def compare(old: Run, new: Run) -> Comparison:
    """Match the cases of two runs by record id, and say what differs."""
    before = {record.id: record for record in old.records}
    after = {record.id: record for record in new.records}
    pairs = [(before[case], after[case]) for case in before if case in after]
    return Comparison(
        old=old,
        new=new,
        changed=_changed(pairs),
        moved=_moved(pairs),
        gone=tuple(worst_first(r for r in old.records if r.id not in after)),
        added=tuple(worst_first(r for r in new.records if r.id not in before)),
        environment=differences(old.records, new.records),
        notes=_notes(old, new, bool(pairs)),
    )


def change_of(old: Verdict, new: Verdict) -> Change | None:
    """How the verdict changed; None where all that tells one from another is the same.

    The order of causes does not count. A case that was not run on one side is neither worse nor
    better: nothing is known of it there.
    """
    if _state(old) == _state(new):
        return None
    if old.status is not new.status and Status.NOT_RUN in (old.status, new.status):
        return Change.NOW_RUN if old.status is Status.NOT_RUN else Change.NOT_RUN
    if old.passed == new.passed or old.status is Status.NOT_RUN:
        return Change.OTHER
    return Change.WORSE if old.passed else Change.BETTER


def _state(verdict: Verdict) -> tuple[object, ...]:
    """What tells verdicts apart: of errors the message, too, and what was found without a name."""
    said = headline(verdict) if verdict.status is Status.ERROR else ""
    unnamed = sum(not finding.cause for finding in verdict.findings)
    causes, noted = frozenset(verdict.causes), frozenset(verdict.noted)
    return verdict.status, causes, noted, verdict.passed, said, unnamed


def noise(old: Verdict, new: Verdict) -> float:
    """Tolerances by which the margin may move between the two for no reason."""
    beyond = [v.margin for v in (old, new) if math.isfinite(v.margin) and v.margin > 1]
    faulty = FAULTY_NOISE * min(beyond) if len(beyond) == 2 else 0.0
    return max(LEAST_NOISE, faulty, _floor(old), _floor(new))


def moved_by(old: Verdict, new: Verdict) -> float:
    """Tolerances between two margins: infinite from finite to not, 0 between two that are not."""
    before, after = orderly(old.margin), orderly(new.margin)
    return 0.0 if before == after else abs(after - before)


def _floor(verdict: Verdict) -> float:
    """The worst tensor's noise floor in tolerances; 0 where the floor is not that comparison's.

    ``noise_floor`` is that of C, in the case's own arithmetic. In mixed precision it is some 1e10
    of B's tolerances, which are of float64, and would hide every move there. Of C's it is at most
    1/kappa today; read from the record, it stays right beside one of another kappa.
    """
    if verdict.worst is None or verdict.worst.noise_floor is None:
        return 0.0
    compared_with, _, tolerance = deciding(verdict.worst)
    if compared_with != "oracle" or not tolerance:
        return 0.0
    floor = verdict.worst.noise_floor / tolerance
    return floor if math.isfinite(floor) else 0.0


def _changed(pairs: Iterable[tuple[Record, Record]]) -> tuple[Changed, ...]:
    kinds = list(Change)
    found = [
        Changed(change, old, new)
        for old, new in pairs
        if (change := change_of(old.verdict, new.verdict)) is not None
    ]

    def place(case: Changed) -> tuple[object, ...]:
        by = moved_by(case.old.verdict, case.new.verdict)
        return (kinds.index(case.change), not fails(case.new), -by, fixed_key(case.new))

    return tuple(sorted(found, key=place))


def _moved(pairs: Iterable[tuple[Record, Record]]) -> tuple[Moved, ...]:
    found = [
        Moved(old, new, noise(old.verdict, new.verdict))
        for old, new in pairs
        if change_of(old.verdict, new.verdict) is None
        and moved_by(old.verdict, new.verdict) > noise(old.verdict, new.verdict)
    ]

    def place(case: Moved) -> tuple[object, ...]:
        by = moved_by(case.old.verdict, case.new.verdict)
        return (not case.rose, -by, fixed_key(case.new))

    return tuple(sorted(found, key=place))


def _notes(old: Run, new: Run, matched: bool) -> tuple[str, ...]:
    texts = [f"old run: {text}" for text in notices(old)]
    texts += [f"new run: {text}" for text in notices(new)]
    if not matched and old.records and new.records:
        texts.append(
            "note: no case is in both runs: a case is known by its test's node id, which is "
            "relative to the folder that pytest ran in"
        )
    return tuple(texts)
