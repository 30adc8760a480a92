"""The margin of a case over several runs."""

from __future__ import annotations

import math

import pytest
import verdicts
from panel_drawing import Drawings, assert_drawable

from equivtest.compare.verdict import Status
from equivtest.plan import Plan
from equivtest.report.history import Point
from equivtest.report.page import render_page
from equivtest.report.panels.trend import Trend, trend
from equivtest.report.run import Run

OK, BAD, NOT_RUN = Status.EQUIVALENT, Status.FAULT, Status.NOT_RUN


def figure(*found: tuple[Status, float]) -> Trend:
    points = tuple(Point(f"run-{k}", *one) for k, one in enumerate(found))
    record = verdicts.record(verdicts.fault(Plan(4, 2, 2)))
    page = Drawings(render_page(Run((record,), history={record.id: points})))
    assert "By run: " in page.html
    assert_drawable(page)
    made = trend(points)
    assert made is not None
    assert all(0 <= dot.x <= 250 and 0 <= dot.y <= 40 for dot in made.dots)
    return made


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ([(OK, 0.2), (OK, 0.3)], "2 runs, margin 0.20 in the first, 0.30 in the latest"),
        (
            [(OK, 0.2), (OK, 9.0), (BAD, 5e4)],
            "3 runs, margin 0.20 in the first, 5.0e4 in the latest",
        ),
        ([(NOT_RUN, math.nan), (OK, 0.3)], "2 runs, margin – in the first, 0.30 in the latest"),
        ([(NOT_RUN, math.nan), (NOT_RUN, math.nan)], "2 runs, margin known in none"),
    ],
)
def test_the_title_tells_the_first_and_the_latest(
    found: list[tuple[Status, float]], told: str
) -> None:
    assert figure(*found).title == told


def test_heights_are_powers_of_ten_from_a_thousandth_to_a_million() -> None:
    margins = (1e-3, 1.0, 1e3, 1e6, 1e9, 1e-9, 0.0, -1.0, math.inf)
    made = figure(*((OK, margin) for margin in margins))
    assert [dot.y for dot in made.dots] == [40, 26.7, 13.3, 0, 0, 40, 40, 40, 0]
    assert made.one == 26.7
    assert [dot.beyond for dot in made.dots] == [m > 1 for m in margins]
    assert [dot.x for dot in made.dots][:3] == [0, 31.2, 62.5]
    assert made.path.startswith("M0 40L31.2 26.7L")


def test_what_was_not_judged_has_no_place_and_a_broken_tensor_the_worst() -> None:
    made = figure((OK, 0.2), (Status.ERROR, math.nan), (BAD, math.nan))
    assert [(dot.x, dot.y, dot.beyond) for dot in made.dots[1:]] == [(250, 0, True)]
    assert made.dots[1].text == "run-2: ≠ fault, margin –"
    assert figure((NOT_RUN, math.nan), (Status.INCONCLUSIVE, math.nan)).dots == ()


def test_one_run_is_no_history() -> None:
    assert trend([]) is None
    assert trend([Point("a", OK, 0.2)]) is None
