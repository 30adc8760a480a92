"""Distance by depth: the tensors in the model's order, with noise floor, tolerance and cap.

Of each tensor what decided stands above, with the tolerance that decided; below, smaller, how far
the arithmetic is from the float64 large batch, with the floor, tolerance and cap of the precision:
two questions, whose scales differ by what the precision rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.prose import deciding
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import Verdict

WIDTH = 100.0
"""Of the axis: places are in per cent, so that it fits a phone."""

_MOST = 60
"""Tensors that are drawn one by one; of more, the worst of each module."""

_LEAST, _LARGEST = 1e-18, 1e4
"""Distances beyond are drawn at the border."""


@dataclass(frozen=True)
class Mark:
    """The distance of one update: ``x`` in per cent."""

    x: float
    beyond: bool
    worst: bool
    text: str


@dataclass(frozen=True)
class Line:
    """One tensor, or the worst of a module; places in per cent, None where there is nothing."""

    name: str
    of: str
    tolerance: float | None
    floor: float | None
    oracle: float | None
    oracle_tolerance: float | None
    marks: tuple[Mark, ...]
    margin: str
    beyond: bool


@dataclass(frozen=True)
class Depth:
    """The figure: ``ticks`` are places with their label, ``cap`` a place."""

    title: str
    folded: str
    lines: tuple[Line, ...]
    ticks: tuple[tuple[float, str], ...]
    cap: float | None


@dataclass(frozen=True)
class _Axis:
    low: int
    high: int

    def at(self, value: float | None) -> float | None:
        if value is None or math.isnan(value):
            return None
        bounded = min(max(value, 10.0**self.low), 10.0**self.high)
        return round((math.log10(bounded) - self.low) / (self.high - self.low) * WIDTH, 1)


def depth(verdict: Verdict) -> Depth | None:
    """The figure of a case; None where no tensor was compared."""
    if not verdict.rows:
        return None
    by_tensor: dict[str, list[TensorRow]] = {}
    for row in verdict.rows:
        by_tensor.setdefault(row.tensor, []).append(row)
    groups = [(name, rows, "") for name, rows in by_tensor.items()]
    shown, folded = (groups, "") if len(groups) <= _MOST else _folded(by_tensor)
    axis = _axis(verdict.rows, verdict.card.cap)
    return Depth(
        title=title([max(_judged(rows) or rows, key=_margin) for _, rows, _ in groups]),
        folded=folded,
        lines=tuple(_line(name, rows, of, axis) for name, rows, of in shown),
        ticks=tuple(_ticks(axis)),
        cap=axis.at(verdict.card.cap),
    )


def title(worst: Sequence[TensorRow]) -> str:
    """Of the worst row of each tensor: how many are beyond tolerance, and how far."""
    judged = _judged(worst)
    if not judged:
        return "no tensor was judged"
    left_out = len(worst) - len(judged)
    return _reach(judged) + (f"; {left_out:,} not judged" if left_out else "")


def _judged(rows: Sequence[TensorRow]) -> list[TensorRow]:
    return [r for r in rows if r.state != "not judged" and deciding(r)[1] is not None]


def _reach(worst: Sequence[TensorRow]) -> str:
    beyond = [row.margin for row in worst if not row.margin <= 1]
    one = len(worst) == 1
    if not beyond:
        largest = max(row.margin for row in worst)
        every = "the one tensor" if one else f"all {len(worst):,} tensors"
        return f"{every} within tolerance, at most {largest:.2g} of it"
    every = "the one tensor" if one else f"{len(beyond):,} of {len(worst):,} tensors"
    every = "every tensor" if len(beyond) == len(worst) > 1 else every
    finite = [margin for margin in beyond if math.isfinite(margin)]
    if not finite:
        return f"{every} beyond any tolerance"
    low, high = figures.margin(min(finite)), figures.margin(max(finite))
    reach = high if low == high else f"{low} to {high}"
    any_more = f", {len(beyond) - len(finite):,} of them any" if len(finite) < len(beyond) else ""
    return f"{every} beyond tolerance, {reach} times as far as it allows{any_more}"


def _margin(row: TensorRow) -> float:
    return figures.orderly(row.margin)


_Group = tuple[str, list[TensorRow], str]


def _folded(by_tensor: dict[str, list[TensorRow]]) -> tuple[list[_Group], str]:
    """The worst tensor of each module, of modules so deep that there are few enough.

    Of more modules than can be drawn the worst tensors of all, in the model's order.
    """
    names = list(by_tensor)
    worst = {name: max(map(_margin, rows)) for name, rows in by_tensor.items()}
    for level in range(max(name.count(".") for name in names), 0, -1):
        modules: dict[str, list[str]] = {}
        for name in names:
            modules.setdefault(_module(name, level), []).append(name)
        if len(modules) <= _MOST:
            groups = [_worst_of(module, own, worst) for module, own in modules.items()]
            told = f"the worst tensor of each of {len(groups)} modules"
            return [(name, by_tensor[name], of) for name, of in groups], told
    kept = set(sorted(names, key=lambda name: -worst[name])[:_MOST])
    told = f"the {_MOST} worst of {len(names):,} tensors"
    return [(name, by_tensor[name], "") for name in names if name in kept], told


def _module(name: str, level: int) -> str:
    """The module that holds the tensor, at most so deep; a tensor of the model's own is itself."""
    parts = name.split(".")
    return ".".join(parts[:-1][:level]) or name


def _worst_of(module: str, members: Sequence[str], worst: Mapping[str, float]) -> tuple[str, str]:
    name = max(members, key=worst.__getitem__)
    return name, f"worst of {len(members)} in {module}" if len(members) > 1 else ""


def _axis(rows: Iterable[TensorRow], cap: float | None) -> _Axis:
    values = [cap] if cap is not None else []
    for row in rows:
        _, distance, tolerance = deciding(row)
        values += [v for v in (distance, tolerance, row.noise_floor, row.oracle_distance) if v]
    drawn = [min(max(v, _LEAST), _LARGEST) for v in values if math.isfinite(v) and v > 0]
    if not drawn:
        return _Axis(-16, 0)
    low, high = math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn)))
    return _Axis(low, max(high, low + 1))


def _ticks(axis: _Axis) -> Iterable[tuple[float, str]]:
    every = max(1, math.ceil((axis.high - axis.low) / 7))
    for exponent in range(axis.low, axis.high + 1, every):
        place = axis.at(10.0**exponent)
        if place is not None:
            yield place, "1" if exponent == 0 else f"1e{exponent}"


def _line(name: str, rows: Sequence[TensorRow], of: str, axis: _Axis) -> Line:
    worst = max(rows, key=_margin)
    _, _, tolerance = deciding(worst)
    return Line(
        name=name,
        of=of,
        tolerance=axis.at(tolerance),
        floor=None if worst.null else axis.at(worst.noise_floor),
        oracle=axis.at(worst.oracle_distance),
        oracle_tolerance=axis.at(worst.oracle_tolerance),
        marks=tuple(_mark(row, row is worst, axis) for row in rows if deciding(row)[1] is not None),
        margin=figures.margin(worst.margin),
        beyond=not worst.margin <= 1,
    )


def _mark(row: TensorRow, worst: bool, axis: _Axis) -> Mark:
    _, distance, tolerance = deciding(row)
    place = axis.at(math.inf if distance is None or math.isnan(distance) else distance)
    assert place is not None, "infinity is drawn at the border"
    return Mark(
        x=place,
        beyond=not row.margin <= 1,
        worst=worst,
        text=f"update {row.update}: distance {figures.distance(distance)}, "
        f"allowed {figures.distance(tolerance)}",
    )
