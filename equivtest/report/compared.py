"""A comparison of two runs in words: for the terminal and the page."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from equivtest.compare import figures
from equivtest.compare.prose import headline, margin_text
from equivtest.compare.verdict import Status, Verdict
from equivtest.report.comparing import Changed, Comparison, Moved
from equivtest.report.environment import Difference
from equivtest.report.ranking import SYMBOLS, fails
from equivtest.report.record import Record
from equivtest.report.summary import case_name

_CHANGED = 10
_MOVED = 5
_NAMES = 3
_WIDTH = 98


def lines(comparison: Comparison) -> list[str]:
    """The comparison on one screen of a terminal."""
    shown = [title(comparison)]
    for case in comparison.changed[:_CHANGED]:
        shown += _wrapped(changed_text(case))
    shown += _more(len(comparison.changed) - _CHANGED, "changed verdict")
    for moved in comparison.moved[:_MOVED]:
        shown += _wrapped(moved_text(moved))
    shown += _more(len(comparison.moved) - _MOVED, "moved margin")
    shown += _listed("gone", comparison.gone) + _listed("added", comparison.added)
    if comparison.environment:
        shown += ["environment:", *(f"  {difference_text(d)}" for d in comparison.environment)]
    return [*shown, *comparison.notes]


def title(comparison: Comparison) -> str:
    """The comparison in one sentence."""
    cases = figures.several(comparison.matched, "case")
    if comparison.same:
        return f"{cases} in both runs: no verdict changed, no margin moved, none added, none gone."
    kinds = ", ".join(f"{count} {kind}" for kind, count in comparison.counts.items() if count)
    verdicts = "their verdict" if comparison.matched != 1 else "its verdict"
    return (
        f"{len(comparison.changed):,} of {cases} changed {verdicts}{f' ({kinds})' if kinds else ''}"
        f", {figures.several(len(comparison.moved), 'margin')} moved"
        f", {len(comparison.added):,} added, {len(comparison.gone):,} gone."
    )


def changed_text(case: Changed) -> str:
    """The case, what its verdict was and is, and what is the matter with it now."""
    old, new = case.old.verdict, case.new.verdict
    before, after = _state(old), _state(new)
    if before == after:
        before, after = f"{before}, {_expected(old)},", f"{after}, {_expected(new)}"
    else:
        before = f"{before},"
    # An equivalent case has nothing to add: its headline is the same of every one.
    matter = "" if new.status is Status.EQUIVALENT else f": {headline(new)}"
    head = f"{SYMBOLS[new.status]} {case.change}: {case_name(case.new)}"
    return f"{head}: was {before} now {after}{matter}"


def moved_text(case: Moved) -> str:
    """The case, its margin before and now, and what noise may do."""
    old, new = case.old.verdict, case.new.verdict
    return (
        f"{SYMBOLS[new.status]} {case_name(case.new)}: margin was {margin_text(old)}, now "
        f"{margin_text(new)} (noise {figures.margin(case.noise)})"
    )


def difference_text(difference: Difference) -> str:
    """A property, with its value in the old run and in the new."""
    if difference.old is None:
        return f"{difference.name}: {difference.new}, only in the new run"
    if difference.new is None:
        return f"{difference.name}: {difference.old}, only in the old run"
    return f"{difference.name}: was {difference.old}, now {difference.new}"


def _state(verdict: Verdict) -> str:
    causes = f" ({'; '.join(verdict.causes)})" if verdict.causes else ""
    return f"{verdict.status.value}{causes}"


def _expected(verdict: Verdict) -> str:
    return "as expected" if verdict.passed else "not as expected"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        max_lines=2,
        placeholder=" …",
    )


def _more(count: int, noun: str) -> list[str]:
    return [f"  and {figures.several(count, f'more {noun}')}"] if count > 0 else []


def _listed(label: str, records: Sequence[Record]) -> list[str]:
    """The first cases of one run alone by name, and how many are not as expected."""
    if not records:
        return []
    failing = sum(map(fails, records))
    names = [f"{SYMBOLS[r.verdict.status]} {case_name(r)}" for r in records[:_NAMES]]
    names += ["…"] if len(records) > _NAMES else []
    beside = f", {failing:,} not as expected" if failing else ""
    return [f"{label}{beside}: {', '.join(names)}"]
