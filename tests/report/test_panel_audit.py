"""Examples by microbatch: what came more or less often than planned, and where."""

from __future__ import annotations

import pytest
import verdicts
from panel_drawing import drawing_of

from equivtest.compare.tables import ExampleRow, MicrobatchRow
from equivtest.plan import Plan
from equivtest.report.panels.audit import Audit, audit, runs

Ids = tuple[int, ...] | None


def figure(*pairs: tuple[Ids, Ids]) -> Audit:
    """Of one replica: received beside planned."""
    rows = tuple(ExampleRow(0, 0, k, *pair) for k, pair in enumerate(pairs))
    verdict = verdicts.fault(Plan(2, 2, 1), examples=rows)
    assert "Examples: " in drawing_of(verdict).html
    made = audit(verdict)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("pairs", "told", "surplus", "lacking"),
    [
        ([((0, 1), (0, 1)), ((2, 3), (2, 3))], "4 planned, 4 received, each once", "", ""),
        ([((2, 3), (0, 1)), ((1, 0), (2, 3))], "4 planned, 4 received, each once", "", ""),
        (
            [((0, 1), (0, 1)), ((0, 1), (0, 1))],
            "4 planned, 4 received, each as often as planned",
            "",
            "",
        ),
        (
            [((0, 1), (0, 1)), ((1, 3), (2, 3))],
            "4 planned, 4 received: 1 more often than planned, 1 less often",
            "1",
            "2",
        ),
        (
            [((0, 1), (0, 1)), ((0, 1, 2, 3), (2, 3))],
            "4 planned, 6 received: 2 more often than planned",
            "0–1",
            "",
        ),
        (
            [((0, 1), (0, 1)), ((3,), (2, 3))],
            "4 planned, 3 received: 1 less often",
            "",
            "2",
        ),
        # other examples than the plan's, each as often as the plan has others
        (
            [((4, 5), (0, 1))],
            "2 planned, 2 received: 2 more often than planned, 2 less often",
            "4–5",
            "0–1",
        ),
        ([(None, (0, 1)), (None, (2, 3))], "which examples came is not known", "", ""),
        (
            [((0, 1), (0, 1)), (None, (2, 3))],
            "4 planned, 2 received, unknown in 1 of 2 microbatches",
            "",
            "",
        ),
        (
            [((0, 0), (0, 1)), (None, (2, 3))],
            "4 planned, 2 received, unknown in 1 of 2 microbatches: 1 more often than planned",
            "0",
            "",
        ),
        ([((), ())], "none planned, none received", "", ""),
        ([((), None)], "none planned, none received", "", ""),
        ([((), (0, 1))], "2 planned, 0 received: 2 less often", "", "0–1"),
        ([((0,), None)], "0 planned, 1 received: 1 more often than planned", "0", ""),
    ],
)
def test_the_title_counts_what_came(
    pairs: list[tuple[Ids, Ids]], told: str, surplus: str, lacking: str
) -> None:
    made = figure(*pairs)
    assert (made.title, made.surplus, made.lacking) == (told, surplus, lacking)


def test_examples_of_another_microbatch_are_marked_there() -> None:
    made = figure(((2, 3), (0, 1)), ((1, 0), (1, 0)), ((0, 1), (1, 0)), (None, (4,)), ((), None))
    (line,) = made.lines
    assert [ids.elsewhere for ids in line.microbatches] == [True, False, False, False, False]
    assert made.elsewhere
    assert not figure(((1, 0), (0, 1))).elsewhere


def test_what_is_unknown_or_empty_says_so() -> None:
    (line,) = figure((None, (0,)), ((), ())).lines
    assert [ids.runs for ids in line.microbatches] == [(("unknown", False),), (("none", False),)]


def test_an_empty_microbatch_counts_zero_supervised_and_an_unknown_none() -> None:
    rows = tuple(ExampleRow(0, 0, k, (k,), (k,)) for k in range(3))
    counted = (MicrobatchRow(0, 0, 0, 0.0, 1, 0), MicrobatchRow(0, 0, 1, None, 1, 0))
    made = audit(verdicts.fault(Plan(1, 3, 1), examples=rows, microbatches=counted))
    assert made is not None
    assert [ids.supervised for ids in made.lines[0].microbatches] == ["0", "", ""]


@pytest.mark.parametrize(
    ("ids", "marked", "told"),
    [
        ((), (), []),
        ((3,), (), [("3", False)]),
        ((0, 1, 2, 7), (), [("0–2", False), ("7", False)]),
        ((2, 1, 0), (), [("2", False), ("1", False), ("0", False)]),
        ((0, 0, 1), (), [("0", False), ("0–1", False)]),
        ((0, 1, 2), (1,), [("0", False), ("1", True), ("2", False)]),
        ((0, 1, 2), (0, 1, 2), [("0–2", True)]),
    ],
)
def test_neighbours_that_follow_each_other_are_one(
    ids: tuple[int, ...], marked: tuple[int, ...], told: list[tuple[str, bool]]
) -> None:
    assert runs(ids, marked) == told


def test_of_many_ids_the_first_and_their_number() -> None:
    many = tuple(range(0, 60, 2))
    (line,) = figure((many, many)).lines
    (ids,) = line.microbatches
    assert len(ids.runs) == 25
    assert ids.runs[-1] == ("… 30 in all", False)
    assert figure((many, ())).surplus.endswith("28, 30, …")


def test_a_line_for_each_update_and_replica_and_a_column_for_the_most_microbatches() -> None:
    rows = tuple(
        ExampleRow(u, r, k, (k,), (k,)) for u, r, k in ((1, 0, 0), (0, 1, 1), (0, 1, 0), (0, 0, 0))
    )
    made = audit(verdicts.fault(Plan(1, 2, 2), examples=rows))
    assert made is not None
    assert [(line.update, line.replica, len(line.microbatches)) for line in made.lines] == [
        (0, "replica 0", 1),
        (0, "replica 1", 2),
        (1, "replica 0", 1),
    ]
    assert made.microbatches == 2


def test_without_forwards_there_is_no_figure() -> None:
    assert audit(verdicts.equivalent(Plan(2, 2, 1), examples=())) is None
