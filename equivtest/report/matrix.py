"""The m × A × D matrix: a row a precision of one experiment and loop, a column a plan."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from equivtest.compare.prose import margin_text
from equivtest.compare.verdict import Status
from equivtest.report.ranking import SYMBOLS, fails, fixed_key, plan_sizes, precision_rank
from equivtest.report.record import Record

# Margins above these get a darker shade, so that a look tells decades apart.
SHADES = (10.0, 1e3, 1e6)


@dataclass(frozen=True)
class Column:
    """A plan: ``label`` is its name without D, which stands above."""

    plan: str
    label: str
    D: int
    A: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Cell:
    """A case of the matrix."""

    record: Record
    symbol: str
    mark: str
    figure: str
    shade: str
    title: str


@dataclass(frozen=True)
class Row:
    """One precision: for each column its cases (usually one, none where it was not run)."""

    precision: str
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Block:
    """One experiment under one loop and wrapper."""

    experiment: str
    loop: str
    wrap: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Matrix:
    """All blocks with the same examples per update."""

    examples: int
    columns: tuple[Column, ...]
    blocks: tuple[Block, ...]

    @property
    def replicas(self) -> list[tuple[int, int]]:
        """Each D with the number of its columns."""
        return [(D, len(list(group))) for D, group in groupby(c.D for c in self.columns)]


def matrices(records: Iterable[Record]) -> list[Matrix]:
    """A matrix for each number of examples per update, because only those share plans.

    Matrices with a failure come first, and in each the experiments with one.
    """
    by_examples: dict[int, list[Record]] = {}
    for record in records:
        by_examples.setdefault(record.verdict.card.examples, []).append(record)
    ordered = sorted(by_examples.items(), key=lambda item: (not any(map(fails, item[1])), item[0]))
    return [_matrix(examples, group) for examples, group in ordered]


def cell(record: Record) -> Cell:
    """The cell of one case: its symbol, its margin, and in words what the colour says."""
    verdict = record.verdict
    status, failing = verdict.status, fails(record)
    unusual = verdict.expect != ("equivalent",)
    figure = margin_text(verdict) if verdict.rows else ""
    expected = "not as expected" if failing else "as expected"
    margin = f", margin {figure}" if figure else ""
    causes = f" ({', '.join(verdict.causes)})" if verdict.causes else ""
    return Cell(
        record=record,
        symbol=SYMBOLS[status],
        mark=("✗" if failing else "✓") if unusual else "",
        figure=figure if status not in (Status.ERROR, Status.NOT_RUN) else status.value,
        shade=f"{status.value} s{shade(verdict.margin)}",
        title=f"{verdict.card.plan} {verdict.card.precision}: "
        f"{status.value}{causes}{margin}, {expected}",
    )


def shade(margin: float) -> int:
    """0 up to half of the tolerance, 1 within it or just beyond, up to 4 beyond a million."""
    if math.isnan(margin) or margin <= 0.5:
        return 0
    return 1 + sum(margin > bound for bound in SHADES)


def _matrix(examples: int, records: list[Record]) -> Matrix:
    columns = sorted({_column(r) for r in records}, key=lambda c: (c.D, c.A, c.sizes, c.plan))
    ordered = sorted(records, key=fixed_key)
    grouped = groupby(ordered, key=lambda r: (r.experiment, r.loop, r.wrap))
    by_name = [(names, list(group)) for names, group in grouped]
    by_name.sort(key=lambda item: not any(map(fails, item[1])))
    blocks = [Block(*names, rows=_rows(group, columns)) for names, group in by_name]
    return Matrix(examples, tuple(columns), tuple(blocks))


def _rows(records: list[Record], columns: Sequence[Column]) -> tuple[Row, ...]:
    precisions = sorted({r.verdict.card.precision for r in records}, key=precision_rank)
    return tuple(
        Row(
            precision,
            tuple(
                tuple(
                    cell(r)
                    for r in records
                    if r.verdict.card.precision == precision and r.verdict.card.plan == column.plan
                )
                for column in columns
            ),
        )
        for precision in precisions
    )


def _column(record: Record) -> Column:
    card = record.verdict.card
    return Column(
        plan=card.plan,
        label=card.plan.replace(f"-D{card.D}", "", 1),
        D=card.D,
        A=card.A,
        sizes=plan_sizes(card.m),
    )
