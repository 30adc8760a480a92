"""Events of the ranks: reductions, outcomes and ranks that differ, as the marks show them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import verdicts
from panel_drawing import assert_drawable, drawing_of

from equivtest.compare.tables import EventRow
from equivtest.plan import Plan
from equivtest.report.panels.events import Events, events

KINDS = {
    "F": "forward",
    "B": "backward",
    "R": "collective",
    "Z": "zero_grad",
    "C": "clip",
    "?": "update attempted",
    "+": "update applied",
    "x": "update skipped",
    "s": "scaler update",
}
ONE = "FBFBR?+"
"""Two microbatches, reduced at the last backward."""


def made(done: Mapping[tuple[int, int], str], apart_s: float = 0.0) -> tuple[EventRow, ...]:
    """By update and rank a letter an event."""
    rows = []
    for (update, rank), letters in done.items():
        k = -1
        for i, letter in enumerate(letters):
            k += letter == "F"
            number = k if letter in "FBR" and k >= 0 else None
            rows.append(EventRow(rank, update, number, KINDS[letter], "", apart_s * i))
    return tuple(rows)


def figure(done: Mapping[tuple[int, int], str], apart_s: float = 0.0) -> Events:
    verdict = verdicts.fault(Plan(4, 2, 2), events=made(done, apart_s))
    drawn = events(verdict)
    assert drawn is not None
    return drawn


@pytest.mark.parametrize(
    ("done", "told"),
    [
        ([ONE], "one reduction an update, at its last backward, every update applied"),
        (["FBFB?+"], "no reduction, every update applied"),
        (["FBRFB?+"], "one reduction an update, every update applied"),  # too early
        (["FBFB?+R"], "one reduction an update, every update applied"),  # too late
        (["FBFBCR?+"], "one reduction an update, every update applied"),  # after a clip
        (["RFF?+"], "one reduction an update, every update applied"),  # of no backward
        (["R"], "one reduction an update, no update attempted in update 0"),
        (["FBRFBR?+"], "2 reductions an update, every update applied"),
        (
            [ONE, "FBFB?+"],
            "1 reduction in update 0, none in update 1, every update applied",
        ),
        (
            ["FBRFBR?+", ONE],
            "2 reductions in update 0, 1 reduction in update 1, every update applied",
        ),
        (["FBFBR?x"], "one reduction an update, at its last backward, update 0 skipped"),
        (
            ["FBFBR?x", ONE, "FBFBR?x"],
            "one reduction an update, at its last backward, updates 0, 2 skipped",
        ),
        (
            [ONE, "FBFBR"],
            "one reduction an update, at its last backward, no update attempted in update 1",
        ),
        (
            ["FBFBR?x", "FBFBR"],
            "one reduction an update, at its last backward, update 0 skipped, "
            "no update attempted in update 1",
        ),
        # an optimizer that raised
        (
            ["FBFBR?"],
            "one reduction an update, at its last backward, update 0 attempted and not seen to end",
        ),
        # of two optimizers one is skipped
        (["FBFBR?+?x"], "one reduction an update, at its last backward, update 0 skipped"),
        # more updates than a title tells
        (
            ["FB?+", "FBR?+", "FB?+", "FBR?+", "FBRR?+"],
            "none in update 0, 1 reduction in update 1, none in update 2, 1 reduction in update 3, "
            "…, every update applied",
        ),
        (
            ["FB?+", "FBR?+", "FB?+", "FBR?+"],
            "none in update 0, 1 reduction in update 1, none in update 2, 1 reduction in update 3, "
            "every update applied",
        ),
    ],
)
def test_the_title_tells_reductions_and_outcomes(done: list[str], told: str) -> None:
    alike = {(u, rank): letters for u, letters in enumerate(done) for rank in (0, 1)}
    assert figure(alike).title == told


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        (ONE, "FBFB?+", "0 to 1 reductions in update 0, every update applied"),
        (ONE, "FBRFBR?+", "1 to 2 reductions in update 0, every update applied"),
        (ONE, "FBRFB?+", "one reduction an update, every update applied"),
        (ONE, "FBFBR?x", "one reduction an update, at its last backward, update 0 skipped"),
        (
            ONE,
            "FBFBR",
            "one reduction an update, at its last backward, no update attempted in update 0",
        ),
        (
            ONE,
            "FBFBR?",
            "one reduction an update, at its last backward, update 0 attempted and not seen to end",
        ),
    ],
)
def test_a_rank_that_does_otherwise_is_told(first: str, second: str, told: str) -> None:
    drawn = figure({(0, 0): first, (0, 1): second})
    assert drawn.title == f"{told}, ranks differ in update 0"
    assert [lane.ranks for lane in drawn.lanes] == ["rank 0", "rank 1"]


def test_ranks_that_did_the_same_are_one_lane_in_each_update() -> None:
    drawn = figure({(1, 0): ONE, (1, 1): ONE, (0, 0): ONE, (0, 1): "FB?+", (0, 2): ONE})
    assert [(lane.update, lane.ranks) for lane in drawn.lanes] == [
        (0, "ranks 0, 2"),
        (0, "rank 1"),
        (1, "ranks 0–1"),
    ]


def test_marks_say_what_happened_and_equal_neighbours_are_one() -> None:
    (lane,) = figure({(0, 0): "FFBRZ?x"}).lanes
    assert [(mark.label, mark.times) for mark in lane.marks] == [
        ("F0", 1),
        ("F1", 1),
        ("B1", 1),
        ("reduce", 1),
        ("zero", 1),
        ("◇ update", 1),
        ("✕ skipped", 1),
    ]
    (lane,) = figure({(0, 0): "sss"}).lanes
    assert [(mark.label, mark.times, mark.text) for mark in lane.marks] == [
        ("scaler", 3, "scaler update")
    ]


def test_a_detail_tells_marks_apart() -> None:
    row = EventRow(0, 0, None, "clip", "bound 1")
    verdict = verdicts.fault(Plan(4, 1, 1), events=(row, replace(row, detail="bound 2")))
    drawn = events(verdict)
    assert drawn is not None
    assert [mark.text for mark in drawn.lanes[0].marks] == ["clip, bound 1", "clip, bound 2"]


def test_each_event_lasts_until_the_next_of_its_rank() -> None:
    (times,) = figure({(0, 0): "FB?+", (0, 1): "FB"}, 0.5).times
    assert times.duration == "1.5 s"
    assert [name for name, _ in times.ranks] == ["rank 0", "rank 1"]
    (_, first), (_, second) = times.ranks
    assert [(span.x, span.width) for span in first] == [
        (0, 33.33),
        (33.33, 33.33),
        (66.67, 33.33),
        (99.7, 0.3),
    ]
    assert [span.text for span in second] == [
        "forward of microbatch 0: 500 ms",
        "backward of microbatch 0: 0 ms",
    ]


def test_ranks_whose_events_alternate_have_one_row_each() -> None:
    rows = sorted(made({(0, 0): ONE, (0, 1): ONE}, 0.1), key=lambda row: row.at_s)
    drawn = events(verdicts.fault(Plan(4, 2, 2), events=tuple(rows)))
    assert drawn is not None
    assert [name for name, _ in drawn.times[0].ranks] == ["rank 0", "rank 1"]


@pytest.mark.parametrize("apart_s", [0.0, math.nan, math.inf])
def test_without_times_none_are_drawn(apart_s: float) -> None:
    assert figure({(0, 0): ONE}, apart_s).times == ()


def test_64_ranks_of_64_microbatches_are_one_lane_and_eight_times() -> None:
    letters = "FB" * 64 + "R?+"
    verdict = verdicts.fault(
        Plan(1, 64, 64), events=made({(0, rank): letters for rank in range(64)}, 0.001)
    )
    drawn = events(verdict)
    assert drawn is not None
    assert [lane.ranks for lane in drawn.lanes] == ["ranks 0–63"]
    names = [name for name, _ in drawn.times[0].ranks]
    assert names == [*(f"rank {k}" for k in range(7)), "rank 7, the last shown of 64"]
    spans = [span for _, spans in drawn.times[0].ranks for span in spans]
    assert all(0 <= span.x <= span.x + span.width <= 100.01 for span in spans)
    assert_drawable(drawing_of(verdict))


def test_a_clock_that_runs_back_draws_nothing_negative() -> None:
    rows = tuple(EventRow(0, 0, k, "forward", "", at) for k, at in enumerate((1.0, 0.0, 2.0)))
    verdict = verdicts.fault(Plan(4, 2, 1), events=rows)
    drawn = events(verdict)
    assert drawn is not None
    assert drawn.times[0].ranks[0][1][0].text == "forward of microbatch 0: 0 ms"
    assert_drawable(drawing_of(verdict))


def test_without_events_there_is_no_figure() -> None:
    assert events(verdicts.equivalent(Plan(4, 2, 2), events=())) is None
