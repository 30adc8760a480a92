"""Loss, learning rate and loss scale by update, on an axis of examples or of updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from equivtest.compare import figures
from equivtest.compare.tables import UpdateRow
from equivtest.compare.verdict import Verdict

WIDTH, HEIGHT = 250, 62
"""Pixels of one figure's field."""

_LABELLED = 5
"""Points that have their value written; of more the first and the last."""

_SAME = 1e-4
"""Losses nearer than this, relative to the oracle's, are one line to the eye."""


@dataclass(frozen=True)
class Point:
    """One update; ``label`` is its value where there is room for it."""

    x: float
    y: float
    applied: bool
    label: str
    text: str
    anchor: str


@dataclass(frozen=True)
class Curve:
    """One quantity: its points, and ``path`` through them; ``beside`` the oracle's, if drawn.

    One that is ``flat`` needs no figure beside its title.
    """

    name: str
    title: str
    points: tuple[Point, ...]
    path: str
    beside: str
    flat: bool = False


@dataclass(frozen=True)
class Progress:
    """The figures of a case; ``ticks`` are places on the axis with their labels."""

    axis: str
    ticks: tuple[tuple[float, str, str], ...]
    curves: tuple[Curve, ...]
    width: int = WIDTH
    height: int = HEIGHT


def progress(verdict: Verdict) -> Progress | None:
    """The figures; None where fewer than two updates were seen."""
    rows = verdict.updates
    if len(rows) < 2:
        return None
    even = len({row.examples for row in rows}) == 1
    ends = list(accumulate(row.examples for row in rows))
    places = [float(i) for i in range(len(rows))] if even else [float(end) for end in ends]
    curves = [_loss(rows, places)]
    curves += [_curve("learning rate", rows, places, lambda row: row.lr, _steady)]
    curves += [_curve("loss scale", rows, places, lambda row: row.loss_scale, _scale)]
    each = figures.several(rows[0].examples, "example")
    return Progress(
        axis=f"updates, of {each} each" if even else "examples seen at the end of the update",
        ticks=tuple(_ticks(rows, places, even, ends)),
        curves=tuple(curve for curve in curves if curve is not None),
    )


_Value = Callable[[UpdateRow], float | None]
_Title = Callable[[Sequence[float]], str]


def _curve(
    name: str, rows: Sequence[UpdateRow], places: Sequence[float], value: _Value, title: _Title
) -> Curve | None:
    values = [value(row) for row in rows]
    known = [v for v in values if v is not None and math.isfinite(v)]
    if not known:
        return None
    points = _points(rows, places, values, known)
    flat = len(set(known)) == 1 and all(point.applied for point in points)
    return Curve(name, title(known), points, _path(points), "", flat)


def _loss(rows: Sequence[UpdateRow], places: Sequence[float]) -> Curve | None:
    losses = [row.loss for row in rows]
    oracles = [row.oracle_loss for row in rows]
    known = [v for v in [*losses, *oracles] if v is not None and math.isfinite(v)]
    if not any(v is not None and math.isfinite(v) for v in losses):
        return None
    points = _points(rows, places, losses, known)
    told = _beside_oracle(rows)
    beside = _path(_points(rows, places, oracles, known)) if told else ""
    finite = [v for v in losses if v is not None and math.isfinite(v)]
    same = "as the large batch's" if any(v is not None for v in oracles) else _steady(finite)
    return Curve("loss", told or same, points, _path(points), beside)


def _beside_oracle(rows: Sequence[UpdateRow]) -> str:
    """Where it is furthest from the large batch's; empty where it is not to be seen."""
    apart = [
        (_off(row.loss, row.oracle_loss), row.update)
        for row in rows
        if row.loss is not None and row.oracle_loss is not None
    ]
    off, update = max(apart, key=lambda one: one[0], default=(0.0, 0))
    if not off > _SAME:
        return ""
    if math.isinf(off):
        return f"nothing like the large batch's (dashed) in update {update}"
    return f"{figures.per_cent(off)} off the large batch's (dashed) in update {update}"


def _off(loss: float, oracle: float) -> float:
    """Relative to the oracle's; infinite where that is 0 or one of them is not finite alone."""
    if loss == oracle or (math.isnan(loss) and math.isnan(oracle)):
        return 0.0
    if not math.isfinite(loss) or not math.isfinite(oracle) or oracle == 0:
        return math.inf
    return abs(loss - oracle) / abs(oracle)


def _steady(values: Sequence[float]) -> str:
    first, last, low, high = (
        figures.quantity(v) for v in (values[0], values[-1], min(values), max(values))
    )
    if low == high:
        return f"{first} throughout"
    between = "" if {low, high} == {first, last} else f", between {low} and {high}"
    return f"{first} to {last}{between}"


def _scale(values: Sequence[float]) -> str:
    fell = sum(after < before for before, after in pairwise(values))
    if fell:
        return f"{_steady(values)}, lowered {'once' if fell == 1 else f'{fell} times'}"
    return _steady(values)


def _points(
    rows: Sequence[UpdateRow],
    places: Sequence[float],
    values: Sequence[float | None],
    known: Sequence[float],
) -> tuple[Point, ...]:
    low, high, labelled = min(known), max(known), _labelled(len(rows))
    points = []
    for i, (row, place, value) in enumerate(zip(rows, places, values, strict=True)):
        if value is None or not math.isfinite(value):
            continue
        outcome = "" if row.applied else ", skipped"
        points.append(
            Point(
                x=_x(place, places),
                y=round(HEIGHT * (1 - _part(value, low, high)), 1),
                applied=row.applied,
                label=figures.quantity(float(f"{value:.4g}")) if i in labelled else "",
                text=f"update {row.update}: {figures.quantity(value)}{outcome}",
                anchor=_anchor(i, len(rows)),
            )
        )
    return tuple(points)


def _part(value: float, low: float, high: float) -> float:
    """Of the way from low to high, which may be further apart than a float can say."""
    if high == low:
        return 0.5
    half = 1.0 if math.isfinite(high - low) else 0.5
    return (value * half - low * half) / (high * half - low * half)


def _x(place: float, places: Sequence[float]) -> float:
    first, last = places[0], places[-1]
    return round(WIDTH * (place - first) / (last - first), 1) if last > first else 0.0


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{point.x:g} {point.y:g}" for point in points) if points else ""


def _ticks(
    rows: Sequence[UpdateRow], places: Sequence[float], even: bool, ends: Sequence[int]
) -> Iterable[tuple[float, str, str]]:
    for i in _labelled(len(rows)):
        label = f"update {rows[i].update}" if even else f"{ends[i]:,}"
        yield _x(places[i], places), label, _anchor(i, len(rows))


def _labelled(count: int) -> Sequence[int]:
    return range(count) if count <= _LABELLED else (0, count - 1)


def _anchor(i: int, count: int) -> str:
    return "start" if i == 0 else "end" if i == count - 1 else "middle"
