"""How much of each case the page shows, so that it stays readable and loads at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from equivtest.compare import figures
from equivtest.report.grouping import failing_groups
from equivtest.report.ranking import fails, fixed_key, worst_first
from equivtest.report.record import Record

FULL_BYTES = 2_400_000
"""Of cases in full: with those, some 30 to 45 kB each, a page of 1,000 cases stays below 5 MB."""

BRIEF_BYTES = 3_500_000
"""Of cases in full and in brief."""


class Detail(Enum):
    """What is shown of one case."""

    FULL = auto()
    BRIEF = auto()
    """Without figures: verdict, findings, the worst five tensors, card."""
    LINE = auto()
    """Its name, verdict and margin."""


_BUDGETS = {Detail.FULL: FULL_BYTES, Detail.BRIEF: BRIEF_BYTES}
_LESS = {Detail.FULL: Detail.BRIEF, Detail.BRIEF: Detail.LINE}


@dataclass(frozen=True)
class Shown:
    """A case as HTML, and how much of it that is."""

    record: Record
    detail: Detail
    html: str


def shown(records: Sequence[Record], render: Callable[[Record, Detail], str]) -> dict[str, Shown]:
    """By id each case as HTML; the worst of each finding first, in full while there is room.

    Args:
        render: makes the HTML of a case.
    """
    found: dict[str, Shown] = {}
    used, most = 0, Detail.FULL
    for record in _by_importance(records):
        for detail in _from(Detail.FULL if _wanted(record) else Detail.BRIEF, most):
            html = render(record, detail)
            size = len(html.encode("utf-8", "backslashreplace"))
            if not used or used + size <= _BUDGETS.get(detail, math.inf):
                break
            most = _LESS[detail]  # what follows is of less importance: no more is tried
        used += size
        found[record.id] = Shown(record, detail, html)
    return found


def _from(wanted: Detail, most: Detail) -> Iterable[Detail]:
    levels = list(Detail)
    return levels[max(levels.index(wanted), levels.index(most)) :]


def told(found: Sequence[Shown]) -> str:
    """What was left out of how many cases; empty where every case has what its verdict asks for."""
    brief = [one.record for one in found if one.detail is Detail.BRIEF and _wanted(one.record)]
    failing = sum(map(fails, brief))
    lines = sum(one.detail is Detail.LINE for one in found)
    parts = [
        (failing, "that {verb} not as expected {verb} shown in brief"),
        (len(brief) - failing, "with a note {verb} shown in brief"),
        (lines, "{verb} shown as a line"),
    ]
    return ", ".join(
        f"{figures.several(n, 'case')} {how.format(verb='is' if n == 1 else 'are')}"
        for n, how in parts
        if n
    )


def _wanted(record: Record) -> bool:
    """Whether its figures are of interest."""
    return fails(record) or bool(record.verdict.noted)


def _by_importance(records: Sequence[Record]) -> list[Record]:
    leading = [group.worst for group in failing_groups(records)]
    first = {record.id for record in leading}
    failing = [r for r in worst_first(records) if fails(r) and r.id not in first]
    others = sorted((r for r in records if not fails(r)), key=fixed_key)
    others.sort(key=lambda r: not (r.verdict.findings or r.verdict.noted))
    return [*leading, *failing, *others]
