"""Some cases of a run, by words."""

from __future__ import annotations

from dataclasses import replace

from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.summary import case_name


def selected(run: Run, words: str) -> Run:
    """The cases in whose name, test, status or causes every word stands, whatever its case.

    Raises:
        ValueError: there is none.
    """
    wanted = words.lower().split()
    if not wanted:
        raise ValueError(f"--select={words!r} has no word: pass some, as in 'm4-A2-D2 fp32'")
    chosen = tuple(r for r in run.records if all(word in _text(r) for word in wanted))
    if not chosen:
        raise ValueError(
            f"--select={words!r} is found in none of {len(run.records):,} cases: pass words of a "
            "case's name, test, status or cause, as in 'm4-A2-D2 fp32'"
        )
    told = f"{len(chosen):,} of {len(run.records):,} cases: those with {words!r}"
    return replace(run, records=chosen, missing={}, selection=told)


def _text(record: Record) -> str:
    verdict = record.verdict
    parts = (record.id, case_name(record), verdict.status.value, *verdict.causes)
    return " ".join(parts).lower()
