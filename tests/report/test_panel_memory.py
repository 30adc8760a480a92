"""Memory by microbatch: flat or growing, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import verdicts
from panel_drawing import assert_drawable, drawing_of

from equivtest.compare.tables import MicrobatchRow
from equivtest.plan import Plan
from equivtest.report.panels.memory import Memory, memory, title

PLAN = Plan(4, 2, 2)
KIB = 1024


def rows(*updates: Sequence[int], held: int = 0, replica: int = 0) -> tuple[MicrobatchRow, ...]:
    """By update and microbatch the peak in KiB."""
    return tuple(
        MicrobatchRow(u, replica, k, None, peak * KIB, held)
        for u, peaks in enumerate(updates)
        for k, peak in enumerate(peaks)
    )


def figure(found: tuple[MicrobatchRow, ...], device: str = "cpu") -> Memory:
    verdict = verdicts.fault(PLAN, microbatches=found, card=verdicts.card(PLAN, device=device))
    assert_drawable(drawing_of(verdict))
    made = memory(verdict)
    assert made is not None
    for row in made.rows:
        for group in row.groups:
            assert group.x + group.width <= row.width + 0.1
            for bar in group.bars:
                assert group.x <= bar.x <= bar.x + bar.width <= group.x + group.width
                assert 0 <= bar.held <= bar.height <= 44
    return made


@pytest.mark.parametrize(
    ("updates", "held", "told"),
    [
        ([[4, 4]], 0, "4.0 KiB in the one update, nothing kept"),
        ([[4, 4], [4, 4]], 0, "4.0 KiB, in later updates the same, nothing kept"),
        ([[100, 100], [100, 105]], 0, "100.0 KiB, in later updates the same, nothing kept"),
        ([[100], [106]], 0, "100.0 KiB in the first update, 106.0 KiB later, nothing kept"),
        ([[105], [100]], 0, "105.0 KiB, in later updates the same, nothing kept"),
        ([[106], [100]], 0, "106.0 KiB in the first update, only 100.0 KiB later, nothing kept"),
        ([[4], [2], [8]], 0, "4.0 KiB in the first update, 8.0 KiB later, nothing kept"),
        ([[0], [4]], 0, "0 B in the first update, 4.0 KiB later, nothing kept"),
        (
            [[4], [4]],
            2048,
            "4.0 KiB, in later updates the same, up to 2.0 KiB kept of earlier microbatches",
        ),
    ],
)
def test_the_title_tells_whether_it_grows(updates: list[list[int]], held: int, told: str) -> None:
    assert title(rows(*updates, held=held)) == told


def test_bars_are_as_high_as_their_bytes() -> None:
    made = figure(rows([1, 2], [4, 4], held=512))
    (row,) = made.rows
    bars = [bar for group in row.groups for bar in group.bars]
    assert [bar.height for bar in bars] == [11, 22, 44, 44]
    assert {bar.held for bar in bars} == {5.5}
    assert [group.peak for group in row.groups] == ["2.0 KiB", "4.0 KiB"]
    assert bars[1].text == "microbatch 1: 2.0 KiB, 512 B kept of earlier ones"


def test_what_is_kept_elsewhere_does_not_rise_above_its_bar() -> None:
    (row,) = figure(rows([1], held=4096)).rows
    assert row.groups[0].bars[0].held == row.groups[0].bars[0].height == 44


def test_replicas_with_the_same_memory_are_one() -> None:
    alike = [row for r in range(64) for row in rows([4] * 40, replica=r)]
    assert [row.name for row in figure(tuple(alike)).rows] == ["replicas 0–63"]
    apart = (*rows([4], replica=0), *rows([4], replica=1), *rows([5], replica=2))
    assert [row.name for row in figure(apart).rows] == ["replicas 0–1", "replica 2"]


def test_a_drawing_of_some_says_of_how_many() -> None:
    whole = figure(rows([4] * 48))
    assert whole.of == "held by the autograd graph"
    cut = figure(rows([4] * 64, [8] * 64))
    assert cut.title == "4.0 KiB in the first update, 8.0 KiB later, nothing kept"
    assert cut.of == "held by the autograd graph, of the first 48 microbatches of a replica"
    assert sum(len(group.bars) for group in cut.rows[0].groups) == 48


def test_on_a_gpu_it_is_what_was_allocated() -> None:
    assert figure(rows([4]), "cuda").of == "allocated on the GPU"


def test_nothing_measured_is_no_figure() -> None:
    assert memory(verdicts.equivalent(PLAN, microbatches=())) is None
    assert memory(verdicts.equivalent(PLAN, microbatches=rows([0, 0]))) is None
