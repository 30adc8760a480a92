"""Distance by depth: how many tensors are beyond tolerance and how far, and where each is drawn."""

from __future__ import annotations

import math
from typing import Any

import pytest
import verdicts
from panel_drawing import assert_drawable, drawing_of

from equivtest.compare.tables import TensorRow
from equivtest.plan import Plan
from equivtest.report.panels.depth import Depth, depth, title

PLAN = Plan(4, 2, 2)
NOTHING: dict[str, Any] = {"replay_distance": None, "split_distance": None}


def rows(*margins: float) -> list[TensorRow]:
    return [verdicts.tensor(f"t{k}", 0, margin) for k, margin in enumerate(margins)]


def figure(*found: TensorRow, **card: Any) -> Depth:
    verdict = verdicts.fault(PLAN, rows=found, card=verdicts.card(PLAN, **card))
    assert_drawable(drawing_of(verdict))
    drawn = depth(verdict)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(
    ("margins", "told"),
    [
        ((0.2,), "the one tensor within tolerance, at most 0.2 of it"),
        ((0.2, 0.9), "all 2 tensors within tolerance, at most 0.9 of it"),
        ((0.0, 0.0), "all 2 tensors within tolerance, at most 0.043 of it"),
        ((1.0,), "the one tensor within tolerance, at most 1 of it"),
        ((5.0,), "the one tensor beyond tolerance, 5.00 times as far as it allows"),
        ((0.5, 5.0), "1 of 2 tensors beyond tolerance, 5.00 times as far as it allows"),
        ((4.0, 5.0), "every tensor beyond tolerance, 4.00 to 5.00 times as far as it allows"),
        (
            (2.0, 5e4, 0.1),
            "2 of 3 tensors beyond tolerance, 2.00 to 5.0e4 times as far as it allows",
        ),
        ((math.nan,), "the one tensor beyond any tolerance"),
        ((math.inf, math.nan), "every tensor beyond any tolerance"),
        ((0.1, math.nan), "1 of 2 tensors beyond any tolerance"),
        (
            (5.0, math.inf, 0.1),
            "2 of 3 tensors beyond tolerance, 5.00 times as far as it allows, 1 of them any",
        ),
    ],
)
def test_the_title_counts_what_is_beyond(margins: tuple[float, ...], told: str) -> None:
    assert title(rows(*margins)) == told


def test_what_was_not_judged_is_neither_within_nor_beyond() -> None:
    blind = verdicts.tensor("blind", 0, 7.0, state="not judged")
    none = verdicts.tensor("none", 0, 0.1, **NOTHING)
    assert title([blind]) == title([none]) == "no tensor was judged"
    assert title([blind, none, *rows(0.2)]) == (
        "the one tensor within tolerance, at most 0.2 of it; 2 not judged"
    )


def test_a_tensor_counts_by_its_worst_judged_update() -> None:
    found = [verdicts.tensor("a", 0, 0.2), verdicts.tensor("a", 1, 3.0)]
    assert figure(*found).title.startswith("the one tensor beyond tolerance, 3.00 times")
    skipped = [verdicts.tensor("a", 0, 0.2), verdicts.tensor("a", 1, 3.0, state="not judged")]
    assert figure(*skipped).title == "the one tensor within tolerance, at most 0.2 of it"


def test_places_are_powers_of_ten_between_the_ends() -> None:
    row = verdicts.tensor(
        "a",
        replay_distance=1e-4,
        replay_tolerance=1e-6,
        split_distance=None,
        oracle_distance=1e-2,
        noise_floor=1e-8,
    )
    drawn = figure(row, cap=1.0)
    (line,) = drawn.lines
    assert (line.floor, line.tolerance, line.oracle) == (0, 25, 75)
    assert [(mark.x, mark.beyond, mark.worst) for mark in line.marks] == [(50, True, True)]
    assert (line.margin, line.beyond) == ("1.0e2", True)
    assert drawn.cap == 100
    assert drawn.ticks == ((0, "1e-8"), (25, "1e-6"), (50, "1e-4"), (75, "1e-2"), (100, "1"))


def test_a_null_tensor_has_no_floor_and_no_split() -> None:
    (line,) = figure(verdicts.tensor("a", null=True, split_distance=1.0)).lines
    assert line.floor is None
    assert not line.beyond


@pytest.mark.parametrize(
    "changes",
    [
        {"replay_distance": math.nan},
        {"replay_distance": math.inf, "noise_floor": math.inf, "oracle_distance": math.nan},
        {"replay_distance": 0.0, "replay_tolerance": 0.0, "noise_floor": 0.0},
        {"replay_distance": 5e-324, "replay_tolerance": 1e300},
        {"replay_tolerance": math.nan, "noise_floor": -1.0},
        NOTHING | {"replay_tolerance": None, "split_tolerance": None, "oracle_distance": None},
    ],
)
@pytest.mark.parametrize("cap", [None, 0.0, math.inf, math.nan, 0.1])
def test_whatever_the_numbers_are_they_lie_on_the_axis(
    changes: dict[str, Any], cap: float | None
) -> None:
    drawn = figure(verdicts.tensor("a", **changes), cap=cap)
    (line,) = drawn.lines
    places = [line.floor, line.tolerance, line.oracle, drawn.cap, *(m.x for m in line.marks)]
    assert all(0 <= place <= 100 for place in [*places, *(x for x, _ in drawn.ticks)] if place)


def test_up_to_sixty_tensors_are_drawn_one_by_one() -> None:
    drawn = figure(*rows(*[0.2] * 60))
    assert (len(drawn.lines), drawn.folded) == (60, "")


def test_of_more_the_worst_of_each_module() -> None:
    names = [f"blocks.{b}.{part}" for b in range(30) for part in ("w.weight", "w.bias", "v.weight")]
    found = [verdicts.tensor(n, 0, 0.5 if "v" in n else 0.1) for n in ("head.weight", *names)]
    drawn = figure(*found)
    # 61 modules that hold tensors are too many: the blocks they stand in, and the head
    assert drawn.folded == "the worst tensor of each of 31 modules"
    assert (drawn.lines[0].name, drawn.lines[0].of) == ("head.weight", "")
    assert (drawn.lines[1].name, drawn.lines[1].of) == (
        "blocks.0.v.weight",
        "worst of 3 in blocks.0",
    )
    assert drawn.title == "all 91 tensors within tolerance, at most 0.5 of it"


@pytest.mark.parametrize("pattern", ["t{}", "t{}.weight"])
def test_of_more_modules_than_lines_the_worst_tensors_of_all(pattern: str) -> None:
    found = [verdicts.tensor(pattern.format(k), 0, 0.001 * k) for k in range(300)]
    drawn = figure(*found)
    assert drawn.folded == "the 60 worst of 300 tensors"
    assert [line.name for line in drawn.lines] == [pattern.format(k) for k in range(240, 300)]


def test_without_tensors_there_is_no_figure() -> None:
    assert depth(verdicts.equivalent(PLAN, rows=())) is None


def test_a_module_is_what_holds_a_tensor_and_no_tensor() -> None:
    names = [f"blocks.{b}.{part}" for b in range(40) for part in ("weight", "bias")]
    drawn = figure(*(verdicts.tensor(name) for name in ("head.weight", "head.bias", *names)))
    assert drawn.folded == "the worst tensor of each of 41 modules"
    assert drawn.lines[0].of == "worst of 2 in head"
