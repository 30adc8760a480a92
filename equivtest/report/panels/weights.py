"""Contribution weights as a mosaic: width is supervised elements, height the weight of one.

An area is what a microbatch contributes, so each cause has a shape: a local denominator fills equal
areas by replica, a mean of means by microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from equivtest.compare import figures
from equivtest.compare.verdict import Verdict
from equivtest.report.panels.weighed import Weight, title

_WIDTH = 300.0
"""Pixels of the row that holds most supervised elements."""

_HEIGHT = 34.0
"""Pixels of a weight as planned."""

_TALLEST = 88.0
"""Pixels of the highest weight: beside a larger one the planned are drawn lower."""

_EXAGGERATE, _READABLE = (20, 10, 5, 2, 1), 0.4
"""Small deviations are drawn so many times as large, up to this part of a weight; it is said."""

_LONG = 1e4
"""Weights beyond are written with an exponent."""

_LABELLED, _MARKED, _LETTER = 40.0, 9.0, 6.0
"""Pixels that a cell must have for its number, its sign alone, and a letter of its label."""

_TEXT, _GAP, _THINNEST = 14.0, 2.0, 3.0
"""Pixels of a line of text, between two cells, and of a cell that holds next to nothing."""

_REPLICAS, _MICROBATCHES = 8, 16
"""Beyond these, equal rows and equal neighbours are drawn once."""


@dataclass(frozen=True)
class Cell:
    """One microbatch, or neighbours with the same weight; places in pixels from the top left.

    Attributes:
        has_top, height: of the part up to the planned weight.
        summit, gap: of what is above that, or missing below it.
        kind: ``too`` much, ``missing``, or empty as planned.
    """

    x: float
    middle: float
    width: float
    has_top: float
    height: float
    summit: float
    gap: float
    kind: str
    figure: str
    label: str
    name: str
    text: str


@dataclass(frozen=True)
class Row:
    """One replica, or several with the same weights."""

    name: str
    supervised: str
    width: float
    height: float
    base: float
    line: float
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Mosaic:
    """The weights of one update; deviations are drawn ``times`` as large as they are."""

    update: int
    supervised: str
    title: str
    times: int
    rows: tuple[Row, ...]


def mosaics(verdict: Verdict) -> tuple[Mosaic, ...]:
    """A mosaic for each update whose weights were needed to decide."""
    counted = {(m.update, m.replica, m.microbatch): m.supervised for m in verdict.microbatches}
    by_update = groupby(sorted(verdict.weight_rows), key=lambda row: row[0])
    return tuple(_mosaic(update, _weights(rows, counted)) for update, rows in by_update)


def _weights(
    rows: Iterable[tuple[int, int, int, float, float, float]],
    counted: Mapping[tuple[int, int, int], float | None],
) -> list[Weight]:
    """Equally wide where it is not known of all how much they hold, or they hold nothing."""
    found = list(rows)
    held = [counted.get((u, r, k)) for u, r, k, *_ in found]
    known = [n for n in held if n is not None and math.isfinite(n) and n >= 0]
    widths = known if len(known) == len(held) and any(known) else [1.0] * len(held)
    return [
        Weight(r, k, expected, weight, sigma, width)
        for (_, r, k, expected, weight, sigma), width in zip(found, widths, strict=True)
    ]


def _mosaic(update: int, weights: Sequence[Weight]) -> Mosaic:
    rows = [
        (f"replica {replica}", list(of_replica))
        for replica, of_replica in groupby(weights, key=lambda one: one.replica)
    ]
    if len(rows) > _REPLICAS:
        rows = _folded(rows)
    widest = max(sum(one.supervised for one in row) for _, row in rows)
    total = sum(one.supervised for one in weights)
    drawing = _drawing(weights, _WIDTH / widest)
    return Mosaic(
        update=update,
        supervised=figures.quantity(total) if total != len(weights) else "",
        title=title(weights),
        times=drawing.times,
        rows=tuple(_row(name, row, drawing) for name, row in rows),
    )


@dataclass(frozen=True)
class _Drawing:
    """Pixels of a supervised element and of a weight, and how deviations are exaggerated."""

    element: float
    unit: float
    times: int
    tallest: float

    def height(self, ratio: float) -> float:
        """Pixels of a weight; none of a negative one, whose number says what it is."""
        if math.isnan(ratio):
            return 0.0
        return self.unit * min(max(1.0 + (ratio - 1.0) * self.times, 0.0), self.tallest)


def _drawing(weights: Sequence[Weight], element: float) -> _Drawing:
    finite = [one.ratio for one in weights if math.isfinite(one.ratio)]
    off = max((abs(one.ratio - 1.0) for one in weights if one.off), default=0.0)
    times = next((n for n in _EXAGGERATE if off * n <= _READABLE), 1) if off else 1
    tallest = max([1.0 + (ratio - 1.0) * times for ratio in finite] + [1.0])
    return _Drawing(element, min(_HEIGHT, _TALLEST / tallest), times, tallest)


def _folded(rows: Sequence[tuple[str, list[Weight]]]) -> list[tuple[str, list[Weight]]]:
    """Rows with the same weights and widths once, under the names of all."""
    alike: dict[tuple[tuple[str, bool, float], ...], list[list[Weight]]] = {}
    for _, row in rows:
        alike.setdefault(tuple((*one.look, one.supervised) for one in row), []).append(row)
    return [
        (figures.replica_names([r[0].replica for r in same]), same[0]) for same in alike.values()
    ]


def _row(name: str, weights: Sequence[Weight], drawing: _Drawing) -> Row:
    base = _TEXT + drawing.tallest * drawing.unit
    x, cells = 0.0, []
    for first, last, one in _runs(weights):
        width = max(one.supervised * drawing.element, _THINNEST)
        cells.append(_cell(one, first, last, x, width, base, drawing))
        x += width + _GAP
    supervised = sum(one.supervised for one in weights)
    return Row(
        name=name,
        supervised=figures.quantity(supervised) if supervised != len(weights) else "",
        width=round(x - _GAP, 1),
        height=round(base + _TEXT, 1),
        base=round(base, 1),
        line=round(base - drawing.unit, 1),
        cells=tuple(cells),
    )


def _runs(weights: Sequence[Weight]) -> Iterable[tuple[int, int, Weight]]:
    """First and last microbatch of each cell; of many, neighbours with the same number are one."""
    if len(weights) <= _MICROBATCHES:
        for one in weights:
            yield one.microbatch, one.microbatch, one
        return
    for _, run in groupby(weights, key=lambda one: one.look):
        same = list(run)
        whole = replace(same[0], supervised=sum(one.supervised for one in same))
        yield same[0].microbatch, same[-1].microbatch, whole


def _cell(
    one: Weight, first: int, last: int, x: float, width: float, base: float, drawing: _Drawing
) -> Cell:
    height, unit = drawing.height(one.ratio), drawing.unit
    up_to_planned = round(min(height, unit) if one.off else height, 1)
    mark = ("▲" if one.found > one.expected else "▼") if one.off else ""
    finite = math.isfinite(one.found)
    figure = f"{mark}{_number(one)}" if finite else f"{mark}not finite"
    label = f"k{first}" if first == last else f"k{first}–{last}"
    of = f"microbatch {first}" if first == last else f"microbatches {first}–{last}"
    found = f"{one.found:.6g} ± {one.sigma:.1g}" if finite else "not finite"
    return Cell(
        x=round(x, 1),
        middle=round(x + width / 2, 1),
        width=round(width, 1),
        has_top=round(base - up_to_planned, 1),
        height=up_to_planned,
        summit=round(base - max(height, unit), 1),
        gap=round(abs(height - unit), 1) if one.off else 0.0,
        kind={"": "", "▲": "too", "▼": "missing"}[mark],
        figure=figure if width >= _LABELLED else mark if width >= _MARKED else "",
        label=label if width >= _LETTER * len(label) else "",
        name=of,
        text=f"{found}, planned {one.expected:.4g}",
    )


def _number(one: Weight) -> str:
    """Three decimals, and as many more as show that it is off."""
    found = figures.unrounded(one.found)
    hidden = one.off and f"{found:.3f}" == f"{one.expected:.3f}"
    if abs(found) >= _LONG:
        return f"{found:.2g}"
    return figures.weight(found) if hidden else f"{found:.3f}"
