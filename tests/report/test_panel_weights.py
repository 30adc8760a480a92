"""The mosaic of weights: its titles say what the weights have in common, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import verdicts
from panel_drawing import assert_drawable, drawing_of

from equivtest.compare.tables import MicrobatchRow
from equivtest.compare.verdict import Verdict
from equivtest.plan import Plan
from equivtest.report.panels.weights import Cell, Weight, mosaics, title

PLANNED = "every microbatch counts as planned"
ONLY_LAST = "only the last microbatch of each replica counts"
BY_MICROBATCH = "each microbatch contributes the same, whatever it holds"
BY_REPLICA = "each replica contributes the same, whatever it holds"
ONE_A_REPLICA = "one weight a replica: its microbatches count alike"

Rows = Sequence[Sequence[float]]


def weights(found: Rows, holds: Rows | None = None, sigma: float = 1e-7) -> list[Weight]:
    """By replica and microbatch; without ``holds`` each holds 10."""
    return [
        Weight(r, k, 1.0, weight, sigma, holds[r][k] if holds else 10.0)
        for r, row in enumerate(found)
        for k, weight in enumerate(row)
    ]


@pytest.mark.parametrize(
    ("found", "holds", "told"),
    [
        ([[1, 1], [1, 1]], None, PLANNED),
        ([[1 + 3e-7, 1]], None, PLANNED),  # within four sigma of 1e-7
        ([[1 + 5e-7, 1]], None, "1 of 2 microbatches count 1 + 5.0e-7 times what they should"),
        ([[0.5, 0.5], [0.5, 0.5]], None, "every microbatch counts 0.5 times what it should"),
        ([[8.0]], None, "every microbatch counts 8 times what it should"),
        ([[1.0001, 1.0001]], None, "every microbatch counts 1.0001 times what it should"),
        # near enough to be one number to the eye, and not the same fault
        ([[1.0001, 1.0]], None, "1 of 2 microbatches count 1.0001 times what they should"),
        ([[0.5, 0.51]], None, "2 of 2 microbatches count 0.5 to 0.51 times what they should"),
        ([[0, 0], [0, 0]], None, "every microbatch counts 0 times what it should"),
        ([[0, 0, 1], [0, 0, 1]], None, ONLY_LAST),
        ([[0, 0, 3], [0, 0, 3]], None, ONLY_LAST),
        ([[0, 0, 1], [0, 1]], None, ONLY_LAST),  # a last group that is dealt unevenly
        ([[0, 1], [0, 0]], None, "3 of 4 microbatches count 0 times what they should"),
        ([[0, 1], [0.01, 1]], None, "2 of 4 microbatches count 0 to 0.01 times what they should"),
        ([[1, 0], [1, 0]], None, "2 of 4 microbatches count 0 times what they should"),
        # a mean of means: 10 of the 20 that a mean would be, 30 of the 20
        ([[2, 2 / 3]], [[10, 30]], BY_MICROBATCH),
        ([[2, 0.7]], [[10, 30]], "2 of 2 microbatches count 0.7 to 2 times what they should"),
        # where all hold nearly the same, any weights near 1 contribute nearly the same
        ([[1.0001, 1]], [[1000, 1001]], "1 of 2 microbatches count 1.0001 times what they should"),
        ([[1.0005, 1000.5 / 1001]], [[1000, 1001]], BY_MICROBATCH),
        ([[2, 2], [2 / 3, 2 / 3]], [[5, 15], [40, 20]], BY_REPLICA),
        ([[2, 2], [0.7, 0.7]], [[5, 15], [40, 20]], ONE_A_REPLICA),
        ([[2, 2], [1, 1]], [[5, 15], [40, 20]], ONE_A_REPLICA),
        ([[2, 2], [1, 1.1]], None, "3 of 4 microbatches count 1.1 to 2 times what they should"),
        # one microbatch a replica: that each replica has one weight says nothing
        ([[1], [1], [1.5]], None, "1 of 3 microbatches count 1.5 times what they should"),
        ([[1], [1.0001]], None, "1 of 2 microbatches count 1.0001 times what they should"),
        # one replica: that it has one weight says nothing either
        ([[1.5, 1.0]], None, "1 of 2 microbatches count 1.5 times what they should"),
        ([[-1, -1]], None, "every microbatch counts -1 times what it should"),
        ([[-1, 1]], None, "1 of 2 microbatches count -1 times what they should"),
        ([[math.nan, 1]], None, "1 of 2 weights are not finite"),
        ([[1, math.nan]], None, "1 of 2 weights are not finite"),
        ([[math.inf, -math.inf]], None, "2 of 2 weights are not finite"),
        # an empty microbatch has no weight to tell: it is 1 whatever the loop did
        ([[2, 2 / 3, 1]], [[10, 30, 0]], BY_MICROBATCH),
        ([[2, 2 / 3, 1]], [[10, 30, 20]], BY_MICROBATCH),  # 20 of the 20 that a mean would be
        (
            [[2, 2 / 3, 1]],
            [[10, 30, 5]],
            "2 of 3 microbatches count 0.667 to 2 times what they should",
        ),
    ],
)
def test_the_title_is_the_rule_that_all_weights_follow(
    found: Rows, holds: Rows | None, told: str
) -> None:
    assert title(weights(found, holds)) == told


def test_weights_that_cannot_be_told_are_not_said_to_be_as_planned() -> None:
    told = "no weight is off by more than its uncertainty"
    assert title(weights([[1.3, 0.8]], sigma=0.2)) == told
    assert title(weights([[1.001, 0.999]], sigma=0.2)) == PLANNED
    unsure = "weights cannot be told apart here, they are known to ± "
    assert title(weights([[1.3, 0.8]], sigma=0.5)) == f"{unsure}0.5 at best"
    assert title(weights([[1.3, 0.8]], sigma=math.inf)) == f"{unsure}inf at best"
    assert title(weights([[1.3, 1.0]], sigma=math.nan)) != PLANNED


def test_the_pattern_holds_for_64_replicas_of_64_microbatches() -> None:
    holds = [[1.0 + r + k for k in range(64)] for r in range(64)]
    part = sum(map(sum, holds)) / 64
    found = [[part / sum(row)] * 64 for row in holds]
    assert title(weights(found, holds)) == BY_REPLICA
    found[63][63] *= 1.01
    assert title(weights(found, holds)).startswith(("4095 of", "4096 of"))


def made(found: Rows, holds: Sequence[Sequence[float | None]] | None = None) -> Verdict:
    flat = [(r, k, w) for r, row in enumerate(found) for k, w in enumerate(row)]
    held = tuple(MicrobatchRow(0, r, k, holds[r][k], 1, 0) for r, k, _ in flat) if holds else ()
    return verdicts.fault(
        Plan(4, 2, 2),
        weight_rows=tuple((0, r, k, 1.0, w, 1e-7) for r, k, w in flat),
        microbatches=held,
    )


def test_width_is_what_it_holds_and_height_its_weight() -> None:
    (mosaic,) = mosaics(made([[0.5, 1.0], [1.0, 2.0]], [[10, 20], [20, 40]]))
    assert mosaic.supervised == "90"
    first, second = mosaic.rows
    assert (first.supervised, second.supervised) == ("30", "60")
    assert [cell.width for cell in (*first.cells, *second.cells)] == [50, 100, 100, 200]
    assert [cell.height for cell in (*first.cells, *second.cells)] == [17, 34, 34, 34]
    assert [cell.gap for cell in (*first.cells, *second.cells)] == [17, 0, 0, 34]
    assert [cell.kind for cell in (*first.cells, *second.cells)] == ["missing", "", "", "too"]
    assert top(second.cells[1]) == second.line - 34
    assert [cell.x for cell in first.cells] == [0, 52]
    assert first.width == 152


def test_an_empty_microbatch_adds_nothing_to_what_the_replica_holds() -> None:
    (mosaic,) = mosaics(made([[1.0, 1.5]], [[0, 20]]))
    assert mosaic.supervised == mosaic.rows[0].supervised == "20"
    assert [cell.width for cell in mosaic.rows[0].cells] == [3, 300]


@pytest.mark.parametrize(
    "holds", [None, [[None, 300.0]], [[0.0, 0.0]], [[math.nan, 3.0]], [[-1.0, 3.0]]]
)
def test_of_unknown_contents_all_are_as_wide(
    holds: Sequence[Sequence[float | None]] | None,
) -> None:
    (mosaic,) = mosaics(made([[1.0, 1.5]], holds))
    assert mosaic.supervised == ""
    assert [cell.width for cell in mosaic.rows[0].cells] == [150, 150]


def test_of_many_equal_neighbours_and_rows_are_one() -> None:
    row = [1.5] * 63 + [1.0]
    (mosaic,) = mosaics(made([row] * 64, [[10.0] * 64] * 64))
    (one,) = mosaic.rows
    assert one.name == "replicas 0–63"
    assert [cell.name for cell in one.cells] == ["microbatches 0–62", "microbatch 63"]
    assert mosaic.title == "4032 of 4096 microbatches count 1.5 times what they should"


def test_rows_that_hold_other_numbers_are_not_one() -> None:
    holds = [[10.0, 10.0]] * 8 + [[10.0, 30.0]]
    (mosaic,) = mosaics(made([[1.5, 1.0]] * 9, holds))
    assert [(row.name, row.supervised) for row in mosaic.rows] == [
        ("replicas 0–7", "20"),
        ("replica 8", "40"),
    ]


def test_a_weight_that_is_off_by_little_is_not_lost_among_neighbours() -> None:
    (mosaic,) = mosaics(made([[1.0] * 20 + [1.0001] + [1.0] * 20]))
    assert [cell.kind for cell in mosaic.rows[0].cells] == ["", "too", ""]


@pytest.mark.parametrize(
    "found",
    [
        [[math.nan, math.inf], [-math.inf, -3.0]],
        [[math.nan]],
        [[1e300, 1e-300]],
        [[float(k) for k in range(64)]] * 3,
        [[0.0, 0.0], [0.0, 0.0]],
    ],
)
def test_cells_stay_within_the_drawing(found: Rows) -> None:
    (mosaic,) = mosaics(made(found))
    for row in mosaic.rows:
        for cell in row.cells:
            assert 0 <= cell.x <= cell.x + cell.width <= row.width + 0.1
            assert 10 <= top(cell) <= row.base < row.height
            assert 0 <= cell.gap <= 88.1
    assert_drawable(drawing_of(made(found)))


def test_each_update_has_its_own_and_none_where_no_weight_was_needed() -> None:
    rows = ((1, 0, 0, 1.0, 1.0, 1e-7), (0, 0, 0, 1.0, 0.5, 1e-7))
    found = mosaics(verdicts.fault(Plan(4, 1, 1), weight_rows=rows))
    assert [(one.update, one.title) for one in found] == [
        (0, "every microbatch counts 0.5 times what it should"),
        (1, PLANNED),
    ]
    assert mosaics(verdicts.equivalent(Plan(4, 1, 1))) == ()


@pytest.mark.parametrize(
    ("found", "times"),
    [(1.0, 1), (1.01, 20), (0.97, 10), (1.05, 5), (0.85, 2), (1.3, 1), (2.0, 1), (0.0, 1)],
)
def test_small_deviations_are_drawn_larger_and_it_is_said(found: float, times: int) -> None:
    (mosaic,) = mosaics(made([[found, 1.0]]))
    assert mosaic.times == times
    (cell, planned) = mosaic.rows[0].cells
    drawn = 1 + (found - 1) * times
    # The planned weight is as high as the dashed line; the other as many units as it is drawn.
    unit = mosaic.rows[0].base - mosaic.rows[0].line
    assert top(planned) == mosaic.rows[0].line
    assert mosaic.rows[0].base - top(cell) == pytest.approx(drawn * unit, abs=0.2)
    told = f"deviations drawn {times} times as large"
    assert (told in drawing_of(made([[found, 1.0]])).html) == (times > 1)


def test_beside_a_large_weight_the_planned_are_lower_and_in_proportion() -> None:
    (mosaic,) = mosaics(made([[8.0, 1.0]]))
    large, planned = mosaic.rows[0].cells
    base = mosaic.rows[0].base
    assert (base - top(large)) / (base - top(planned)) == pytest.approx(8.0, rel=0.02)


def top(cell: Cell) -> float:
    """Where the weight of a cell ends: above the planned one where it is too much."""
    return cell.summit if cell.kind == "too" else cell.has_top
