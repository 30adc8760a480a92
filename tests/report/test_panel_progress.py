"""Loss, learning rate and loss scale by update."""

from __future__ import annotations

import math
from typing import Any

import pytest
import verdicts
from panel_drawing import assert_drawable, drawing_of

from equivtest.plan import Plan
from equivtest.report.panels.progress import HEIGHT, WIDTH, Curve, Progress, progress

PLAN = Plan(4, 2, 2)
SAME = "as the large batch's"


def figure(*changes: dict[str, Any]) -> Progress:
    rows = tuple(verdicts.update(u, **how) for u, how in enumerate(changes))
    verdict = verdicts.fault(PLAN, updates=rows)
    assert_drawable(drawing_of(verdict))
    made = progress(verdict)
    assert made is not None
    for curve in made.curves:
        assert all(0 <= p.x <= WIDTH and 0 <= p.y <= HEIGHT for p in curve.points)
    return made


def curve(name: str, *changes: dict[str, Any]) -> Curve:
    return next(one for one in figure(*changes).curves if one.name == name)


def losses(*pairs: tuple[float | None, float | None]) -> Curve:
    return curve("loss", *({"loss": loss, "oracle_loss": oracle} for loss, oracle in pairs))


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([(3.0, 3.0), (2.0, 2.0)], SAME),
        ([(3.0, 3.0), (2.00019, 2.0)], SAME),  # 0.95e-4
        ([(3.0, 3.0), (2.00021, 2.0)], "0.011 % off the large batch's (dashed) in update 1"),
        ([(6.0, 3.0), (2.2, 2.0)], "100 % off the large batch's (dashed) in update 0"),
        ([(-3.0, 3.0), (2.0, 2.0)], "200 % off the large batch's (dashed) in update 0"),
        ([(5.0, 0.0), (2.0, 2.0)], "nothing like the large batch's (dashed) in update 0"),
        ([(0.0, 0.0), (2.0, 2.0)], SAME),
        ([(3.0, 3.0), (math.nan, 2.0)], "nothing like the large batch's (dashed) in update 1"),
        ([(math.nan, 3.0), (2.0, 2.0)], "nothing like the large batch's (dashed) in update 0"),
        ([(3.0, math.inf), (2.0, 2.0)], "nothing like the large batch's (dashed) in update 0"),
        ([(3.0, 3.0), (math.nan, math.nan)], SAME),
        ([(3.0, None), (2.0, None)], "3 to 2"),
        ([(3.0, None), (2.0, 2.0)], SAME),
    ],
)
def test_the_loss_is_told_beside_the_large_batch(
    pairs: list[tuple[float | None, float | None]], told: str
) -> None:
    made = losses(*pairs)
    assert made.title == told
    assert bool(made.beside) == ("dashed" in told)


def test_a_loss_that_is_not_known_is_not_drawn() -> None:
    names = [c.name for c in figure({"loss": None}, {"loss": math.nan}).curves]
    assert names == ["learning rate"]
    assert len(losses((3.0, 3.0), (None, 2.0)).points) == 1


@pytest.mark.parametrize(
    ("rates", "told"),
    [
        ([0.1, 0.1, 0.1], "0.1 throughout"),
        ([0.1, 0.1 + 1e-12, 0.1], "0.1 throughout"),
        ([0.1, 0.2, 0.3], "0.1 to 0.3"),
        ([0.3, 0.2, 0.1], "0.3 to 0.1"),
        ([0.1, 0.2, 0.1], "0.1 to 0.1, between 0.1 and 0.2"),
        ([0.1, 0.0, 0.2], "0.1 to 0.2, between 0 and 0.2"),
        ([0.1, math.nan, 0.2], "0.1 to 0.2"),
    ],
)
def test_the_learning_rate_is_told_from_its_ends(rates: list[float], told: str) -> None:
    assert curve("learning rate", *({"lr": rate} for rate in rates)).title == told


@pytest.mark.parametrize(
    ("scales", "told"),
    [
        ([1024.0, 1024.0], "1,024 throughout"),
        ([1024.0, 2048.0], "1,024 to 2,048"),
        ([1024.0, 512.0], "1,024 to 512, lowered once"),
        ([1024.0, 512.0, 1024.0, 256.0], "1,024 to 256, lowered 2 times"),
        ([1024.0, 512.0, 1024.0], "1,024 to 1,024, between 512 and 1,024, lowered once"),
    ],
)
def test_the_loss_scale_tells_how_often_it_fell(scales: list[float], told: str) -> None:
    assert curve("loss scale", *({"loss_scale": scale} for scale in scales)).title == told


def test_even_updates_are_counted_and_others_lie_by_their_examples() -> None:
    even = figure({}, {}, {})
    assert even.axis == "updates, of 32 examples each"
    assert even.ticks == (
        (0, "update 0", "start"),
        (125, "update 1", "middle"),
        (250, "update 2", "end"),
    )
    uneven = figure({"examples": 10}, {"examples": 30}, {"examples": 20})
    assert uneven.axis == "examples seen at the end of the update"
    assert uneven.ticks == ((0, "10", "start"), (150, "40", "middle"), (250, "60", "end"))


def test_high_is_up_and_a_skipped_update_says_so() -> None:
    made = losses((4.0, 4.0), (2.0, 2.0), (3.0, 3.0))
    assert [(p.x, p.y) for p in made.points] == [(0, 0), (125, 62), (250, 31)]
    assert made.path == "M0 0L125 62L250 31"
    skipped = curve("loss", {}, {"applied": False})
    assert [p.applied for p in skipped.points] == [True, False]
    assert skipped.points[1].text == "update 1: 3.41235, skipped"


def test_of_many_updates_the_ends_are_labelled() -> None:
    assert [bool(p.label) for p in curve("loss", *[{}] * 5).points] == [True] * 5
    labelled = [bool(p.label) for p in curve("loss", *[{}] * 6).points]
    assert labelled == [True, False, False, False, False, True]
    assert len(figure(*[{}] * 6).ticks) == 2


@pytest.mark.parametrize(
    "values", [(1e308, -1e308), (0.0, 5e-324), (math.inf, 1.0), (-math.inf, math.nan)]
)
def test_whatever_the_numbers_are_they_can_be_drawn(values: tuple[float, float]) -> None:
    figure(*({"loss": v, "lr": v, "loss_scale": v, "oracle_loss": -v} for v in values))


def test_examples_of_none_are_no_progress() -> None:
    figure({"examples": 0}, {"examples": 0})
    figure({"examples": 5}, {"examples": 0})


def test_one_update_is_no_curve() -> None:
    assert progress(verdicts.equivalent(PLAN, updates=(verdicts.update(0),))) is None
    assert progress(verdicts.equivalent(PLAN, updates=())) is None
