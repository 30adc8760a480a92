"""The margin of a case over several runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.figures import orderly
from equivtest.compare.verdict import Status
from equivtest.report.history import Point
from equivtest.report.ranking import SYMBOLS

WIDTH, HEIGHT = 250, 40
_LOW, _HIGH = -3.0, 6.0
"""Powers of ten of a margin between which it is drawn."""

_NOTHING_JUDGED = (Status.NOT_RUN, Status.ERROR, Status.INCONCLUSIVE)
"""Without a margin these have no place; of a broken tensor it is the worst there is."""


@dataclass(frozen=True)
class Dot:
    """One run; places in pixels."""

    x: float
    y: float
    beyond: bool
    text: str


@dataclass(frozen=True)
class Trend:
    """The figure; ``one`` is the place of margin 1."""

    title: str
    dots: tuple[Dot, ...]
    path: str
    one: float
    width: int = WIDTH
    height: int = HEIGHT


def trend(points: Sequence[Point]) -> Trend | None:
    """The figure; None where there are no two runs."""
    if len(points) < 2:
        return None
    dots = tuple(
        Dot(
            x=round(WIDTH * i / (len(points) - 1), 1),
            y=_y(point.margin),
            beyond=not point.margin <= 1,
            text=f"{point.run_id}: {SYMBOLS[point.status]} {point.status.value}, "
            f"margin {figures.margin(point.margin)}",
        )
        for i, point in enumerate(points)
        if not (math.isnan(point.margin) and point.status in _NOTHING_JUDGED)
    )
    return Trend(
        title=f"{figures.several(len(points), 'run')}, margin {_reach(points)}",
        dots=dots,
        path="M" + "L".join(f"{dot.x:g} {dot.y:g}" for dot in dots) if dots else "",
        one=_y(1.0),
    )


def _reach(points: Sequence[Point]) -> str:
    first, last = points[0].margin, points[-1].margin
    if all(math.isnan(point.margin) for point in points):
        return "known in none"
    return f"{figures.margin(first)} in the first, {figures.margin(last)} in the latest"


def _y(margin: float) -> float:
    margin = orderly(margin)
    power = _LOW if margin <= 0 else _HIGH if math.isinf(margin) else math.log10(margin)
    bounded = min(max(power, _LOW), _HIGH)
    return round(HEIGHT * (1 - (bounded - _LOW) / (_HIGH - _LOW)), 1)
