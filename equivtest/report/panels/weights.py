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

_WIDTH = 300.0
"""Pixels of the row that holds most supervised elements."""

_HEIGHT = 34.0
"""Pixels of a weight as planned."""

_TALLEST = 88.0
"""Pixels of the highest weight: beside a larger one the planned are drawn lower."""

_EXAGGERATE, _READABLE = (20, 10, 5, 2, 1), 0.4
"""Small deviations are drawn so many times as large, up to this part of a weight; it is said."""

_ZERO = 1e-5
"""Weights below are written as 0: float32 leaves some 1e-7."""

_LONG = 1e4
"""Weights beyond are written with an exponent."""

_LABELLED = 40.0
"""Pixels that a cell must have for its number to be written above it."""

_REPLICAS, _MICROBATCHES = 8, 16
"""Beyond these, equal rows and equal neighbours are drawn once."""

_SIGMAS = 4.0
_ALIKE = 2e-3
"""Relative: numbers so near are one number to the eye, and for the title."""

_ACCOUNTED = 0.05
"""Part of the largest deviation that a rule may leave where a title says that all follow it."""


@dataclass(frozen=True)
class Weight:
    """The weight of one microbatch, as found beside as planned."""

    replica: int
    microbatch: int
    expected: float
    found: float
    sigma: float
    supervised: float

    @property
    def ratio(self) -> float:
        """1 where it counts as planned; rounding beside 0 is 0."""
        ratio = self.found / self.expected if self.expected else 1.0 + self.found
        return 0.0 if abs(ratio) < _ZERO else ratio

    @property
    def off(self) -> bool:
        """Beyond what its uncertainty and rounding allow; what is not a number is."""
        return not abs(self.found - self.expected) <= max(
            1e-9 * abs(self.expected), _SIGMAS * self.sigma
        )

    @property
    def look(self) -> tuple[str, bool]:
        """What makes two weights one number to the eye, with the same mark."""
        return f"{self.ratio:.3f}", self.off


@dataclass(frozen=True)
class Cell:
    """One microbatch, or neighbours with the same weight; places in pixels from the top left."""

    x: float
    width: float
    top: float
    height: float
    gap: float
    mark: str
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


def title(weights: Sequence[Weight]) -> str:
    """What the weights of one update have in common; microbatches that hold nothing aside."""
    broken = sum(not math.isfinite(one.found) for one in weights)
    if broken:
        return f"{broken} of {len(weights)} weights are not finite"
    off = [one for one in weights if one.off]
    if not off:
        near = all(abs(one.ratio - 1) <= _ALIKE for one in weights)
        return (
            "every microbatch counts as planned"
            if near
            else "no weight is off by more than its uncertainty"
        )
    holding = [one for one in weights if one.supervised > 0]
    return _shape(holding) or _reach(off, len(weights))


def _shape(weights: Sequence[Weight]) -> str:
    """The rule that all of them follow; empty where there is none."""
    if not any(one.off for one in weights):
        return ""
    mean = sum(one.ratio for one in weights) / len(weights)
    if _follow(weights, [mean] * len(weights)):
        return f"every microbatch counts {_times(mean)} times what it should"
    rows = [[w for w in weights if w.replica == r] for r in {w.replica for w in weights}]
    if _only_last(rows):
        return "only the last microbatch of each replica counts"
    part = sum(one.ratio * one.supervised for one in weights) / len(weights)
    if _follow(weights, [part / one.supervised for one in weights]):
        return "each microbatch contributes the same, whatever it holds"
    return _by_replica(weights, rows)


def _by_replica(weights: Sequence[Weight], rows: Sequence[Sequence[Weight]]) -> str:
    if len(rows) < 2:
        return ""
    held = {row[0].replica: sum(w.supervised for w in row) for row in rows}
    part = sum(w.ratio * w.supervised for w in weights) / len(rows)
    if _follow(weights, [part / held[w.replica] for w in weights]):
        return "each replica contributes the same, whatever it holds"
    means = {row[0].replica: sum(w.ratio for w in row) / len(row) for row in rows}
    several = any(len(row) > 1 for row in rows)
    if several and _follow(weights, [means[w.replica] for w in weights]):
        return "one weight a replica: its microbatches count alike"
    return ""


def _only_last(rows: Iterable[Sequence[Weight]]) -> bool:
    """Of each replica the last one counts, and of some there are others, which count nothing."""
    in_order = [sorted(row, key=lambda one: one.microbatch) for row in rows]
    others = [one for row in in_order for one in row[:-1]]
    last = [row[-1] for row in in_order]
    return (
        bool(others)
        and all(abs(one.ratio) < _ALIKE for one in others)
        and all(abs(one.ratio) >= _ALIKE for one in last)
    )


def _follow(weights: Sequence[Weight], expected: Sequence[float]) -> bool:
    """Whether a rule accounts for what is off, and not only for what is near 1 anyway."""
    largest = max(abs(one.ratio) for one in weights)
    furthest = max(abs(one.ratio - 1) for one in weights)
    allowed = min(_ALIKE * largest, _ACCOUNTED * furthest)
    return all(abs(w.ratio - e) <= allowed for w, e in zip(weights, expected, strict=True))


def _reach(off: Sequence[Weight], count: int) -> str:
    low, high = _times(min(one.ratio for one in off)), _times(max(one.ratio for one in off))
    reach = low if low == high else f"{low} to {high}"
    verb = "counts" if count == 1 else "count"
    of = "the one microbatch" if count == 1 else f"{len(off)} of {count} microbatches"
    return f"{of} {verb} {reach} times what {'it' if count == 1 else 'they'} should"


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
        (figures.rank_names([r[0].replica for r in same]).replace("rank", "replica"), same[0])
        for same in alike.values()
    ]


def _row(name: str, weights: Sequence[Weight], drawing: _Drawing) -> Row:
    base = 14.0 + drawing.tallest * drawing.unit
    x, cells = 0.0, []
    for label, one in _runs(weights):
        width = max(one.supervised * drawing.element, 3.0)
        cells.append(_cell(one, label, x, width, base, drawing))
        x += width + 2.0
    supervised = sum(one.supervised for one in weights)
    return Row(
        name=name,
        supervised=figures.quantity(supervised) if supervised != len(weights) else "",
        width=round(x - 2.0, 1),
        height=round(base + 14.0, 1),
        base=round(base, 1),
        line=round(base - drawing.unit, 1),
        cells=tuple(cells),
    )


def _runs(weights: Sequence[Weight]) -> Iterable[tuple[str, Weight]]:
    """Each weight with its label; of many, neighbours with the same number as one."""
    if len(weights) <= _MICROBATCHES:
        for one in weights:
            yield f"k{one.microbatch}", one
        return
    for _, run in groupby(weights, key=lambda one: one.look):
        same = list(run)
        first, last = same[0], same[-1]
        label = f"k{first.microbatch}"
        if first is not last:
            label += f"–{last.microbatch}"
        yield label, replace(first, supervised=sum(one.supervised for one in same))


def _cell(one: Weight, label: str, x: float, width: float, base: float, drawing: _Drawing) -> Cell:
    height, unit = drawing.height(one.ratio), drawing.unit
    mark = ("▲" if one.found > one.expected else "▼") if one.off else ""
    finite = math.isfinite(one.found)
    figure = f"{mark}{_number(one)}" if finite else f"{mark}not finite"
    room = width >= _LABELLED
    return Cell(
        x=round(x, 1),
        width=round(width, 1),
        top=round(base - height, 1),
        height=round(min(height, unit) if one.off else height, 1),
        gap=round(abs(height - unit), 1) if one.off else 0.0,
        mark=mark,
        figure=figure if room else mark if width >= 9 else "",
        label=label if width >= 6.0 * len(label) else "",
        name=f"microbatch{'es' if '–' in label else ''} {label[1:]}",
        text=(f"{one.found:.6g} ± {one.sigma:.1g}" if finite else "not finite")
        + f", planned {one.expected:.4g}",
    )


def _number(one: Weight) -> str:
    """Three decimals, and as many more as show that it is off."""
    found = 0.0 if abs(one.found) < _ZERO else one.found
    hidden = one.off and f"{found:.3f}" == f"{one.expected:.3f}"
    if abs(found) >= _LONG:
        return f"{found:.2g}"
    return figures.weight(found) if hidden else f"{found:.3f}"


def _times(ratio: float) -> str:
    """Three digits, and beside 1 as many as tell it from 1."""
    return figures.weight(ratio) if abs(ratio - 1) < 0.02 else f"{ratio:.3g}"
