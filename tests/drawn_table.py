"""What came of the drawn cases, added up over tests and xdist workers: the soak's table."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from equivtest.compare.verdict import Status, Verdict

PROPERTY = "drawn"
"""Name of the test property in which a tally travels to the controller."""

INCONCLUSIVE = {"bf16": 0.05}
INCONCLUSIVE_ELSEWHERE = 0.01
"""Largest share of cases in which nothing could be judged."""

MARGINS = {"A": "replay_margin", "B": "split_margin", "C": "oracle_margin"}


@dataclass
class Row:
    """Cases of one precision.

    Attributes:
        statuses: cases by status.
        margins: largest margin of each comparison.
        tensors: rows of tensors and updates by state.
        bits: updates whose gradient is the replay's bit for bit, of those at D up to 2.
    """

    statuses: Counter[str] = field(default_factory=Counter)
    margins: dict[str, float] = field(default_factory=dict)
    tensors: Counter[str] = field(default_factory=Counter)
    bits: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return self.statuses.total()

    @property
    def inconclusive(self) -> float:
        """Share of the cases that ran."""
        ran = self.cases - self.statuses[Status.NOT_RUN]
        return self.statuses[Status.INCONCLUSIVE] / ran if ran else 0.0


@dataclass
class Tally:
    """Rows by what was run and precision."""

    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def row(self, what: str, precision: str) -> Row:
        return self.rows.setdefault((what, precision), Row())

    def add(self, what: str, precision: str, verdict: Verdict) -> None:
        row = self.row(what, precision)
        row.statuses[str(verdict.status)] += 1
        row.tensors.update(str(tensor.state) for tensor in verdict.rows)
        row.bits.update("equal" if u.replay_bits_equal else "other" for u in verdict.updates)
        for letter, name in MARGINS.items():
            found = getattr(verdict, name)
            if found is not None:
                row.margins[letter] = max(row.margins.get(letter, 0.0), float(found))

    def merge(self, other: Tally) -> None:
        for key, theirs in other.rows.items():
            mine = self.row(*key)
            mine.statuses.update(theirs.statuses)
            mine.tensors.update(theirs.tensors)
            mine.bits.update(theirs.bits)
            for letter, margin in theirs.margins.items():
                mine.margins[letter] = max(mine.margins.get(letter, 0.0), margin)

    def excess(self) -> list[str]:
        """Precisions in which too many cases were inconclusive, in a sentence each.

        A single case never is too many: a short run could allow none otherwise.
        """
        said = []
        for (what, precision), row in sorted(self.rows.items()):
            allowed = INCONCLUSIVE.get(precision, INCONCLUSIVE_ELSEWHERE)
            if row.inconclusive > allowed and row.statuses[Status.INCONCLUSIVE] > 1:
                said.append(
                    f"{what}: {row.statuses[Status.INCONCLUSIVE]} of {row.cases} cases in "
                    f"{precision} are inconclusive ({row.inconclusive:.1%}, allowed {allowed:.0%})"
                )
        return said

    def lines(self) -> list[str]:
        """A Markdown table for each thing that was run, and what exceeds its share."""
        lines: list[str] = []
        for what in sorted({what for what, _ in self.rows}):
            rows = {p: r for (w, p), r in self.rows.items() if w == what}
            lines += ["", f"{sum(r.cases for r in rows.values())} cases: {what}", ""]
            lines += _table(rows)
        return lines + self.excess()

    def text(self) -> str:
        """As JSON, for a test's property."""
        return json.dumps(
            [
                [*key, row.statuses, row.margins, row.tensors, row.bits]
                for key, row in self.rows.items()
            ]
        )

    @staticmethod
    def read(text: str) -> Tally:
        tally = Tally()
        for what, precision, statuses, margins, tensors, bits in json.loads(text):
            tally.rows[what, precision] = Row(
                Counter(statuses), margins, Counter(tensors), Counter(bits)
            )
        return tally


def _table(rows: dict[str, Row]) -> Iterable[str]:
    statuses = [s for s in Status if any(row.statuses[s] for row in rows.values())]
    heads = ["precision", "cases", *statuses, "not judged", "bit for bit", *MARGINS]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    for precision, row in sorted(rows.items()):
        cells = [
            precision,
            str(row.cases),
            *(str(row.statuses[s]) for s in statuses),
            f"{row.tensors['not judged']} of {row.tensors.total()}",
            f"{row.bits['equal']} of {row.bits.total()}",
            *(_figure(row.margins.get(letter)) for letter in MARGINS),
        ]
        yield "| " + " | ".join(cells) + " |"


def _figure(margin: float | None) -> str:
    if margin is None or not math.isfinite(margin):
        return "–" if margin is None else "∞"
    return f"{margin:.2g}"
