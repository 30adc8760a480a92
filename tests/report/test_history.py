"""A case over several runs, and which runs of a reports folder are taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import verdicts

from equivtest.compare.verdict import Status, Verdict
from equivtest.plan import Plan
from equivtest.report import record as records
from equivtest.report.history import Point, histories
from equivtest.report.record import Record
from equivtest.report.run import RunFolder, find, load

A, B = Plan(4, 2, 2), Plan(2, 4, 2)
CASE_A = "cases/test_loop.py::test_it[m4-A2-D2-fp32]"
CASE_B = "cases/test_loop.py::test_it[m2-A4-D2-fp32]"


def run_of(run_id: str, *made: Verdict) -> tuple[str, tuple[Record, ...]]:
    return run_id, tuple(map(verdicts.record, made))


def written(reports: Path, run_id: str, day: int, *made: Verdict, lacking: str = "") -> Path:
    """A run's folder, started on that day of January."""
    folder = RunFolder(reports, run_id, f"2026-01-{day:02}T00:00:00+00:00")
    cases = [verdicts.record(verdict) for verdict in made]
    folder.cases.mkdir(parents=True)
    for case in cases:
        records.write(case, folder.cases)
    folder.write_collected([case.nodeid for case in cases] + ([lacking] if lacking else []))
    folder.write_ended({})
    return folder.path


def test_a_case_has_a_point_for_each_run_that_has_it() -> None:
    found = histories(
        [
            run_of("1", verdicts.equivalent(A, margin=0.125)),
            run_of("2", verdicts.equivalent(B)),
            run_of("3", verdicts.fault(A, margin=64.0), verdicts.equivalent(B, margin=0.5)),
        ]
    )
    assert found == {
        CASE_A: (Point("1", Status.EQUIVALENT, 0.125), Point("3", Status.FAULT, 64.0)),
        CASE_B: (Point("2", Status.EQUIVALENT, 0.25), Point("3", Status.EQUIVALENT, 0.5)),
    }


def test_a_case_of_one_run_has_no_history() -> None:
    runs = [run_of("1", verdicts.equivalent(A)), run_of("2", verdicts.equivalent(B))]
    assert histories(runs) == {}
    assert histories([]) == {}


def test_a_point_without_a_margin_is_kept() -> None:
    runs = [run_of("1", verdicts.not_run(A, "fp32")), run_of("2", verdicts.equivalent(A))]
    first, second = histories(runs)[CASE_A]
    assert (first.status, math.isnan(first.margin)) == (Status.NOT_RUN, True)
    assert second == Point("2", Status.EQUIVALENT, 0.25)


def test_of_several_runs_each_must_have_ended(tmp_path: Path) -> None:
    first = written(tmp_path, "r1", 1, verdicts.equivalent(A))
    second = written(tmp_path, "r2", 2, verdicts.equivalent(A))
    assert load([first, second]).ended
    (first / "run.json").unlink()
    assert not load([first, second]).ended


def test_runs_are_loaded_by_when_they_began_whatever_their_names_and_order(tmp_path: Path) -> None:
    late = written(tmp_path / "a", "a", 3, verdicts.equivalent(A, margin=0.75))
    early = written(tmp_path / "z", "z", 1, verdicts.equivalent(A, margin=0.125))
    between = written(tmp_path / "b", "b", 2, verdicts.equivalent(A, margin=0.5))
    run = load([late, early, between])
    assert run.run_ids == ("z", "b", "a")
    assert [(point.run_id, point.margin) for point in run.history[CASE_A]] == [
        ("z", 0.125),
        ("b", 0.5),
        ("a", 0.75),
    ]
    assert [record.verdict.margin for record in run.records] == [0.75]


def test_runs_that_began_together_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    second = written(tmp_path / "x", "r2", 1, verdicts.equivalent(A))
    first = written(tmp_path / "y", "r1", 1, verdicts.equivalent(A))
    assert load([second, first]).run_ids == ("r1", "r2")


def test_a_case_of_three_runs_counts_as_one_that_stands_in_several(tmp_path: Path) -> None:
    for day in (1, 2, 3):
        written(tmp_path, f"r{day}", day, verdicts.equivalent(A))
    run = load(find(tmp_path, latest=3))
    assert (run.replaced, len(run.history[CASE_A])) == (1, 3)


def test_shards_have_no_history(tmp_path: Path) -> None:
    written(tmp_path / "1" / "reports", "r", 1, verdicts.equivalent(A))
    written(tmp_path / "2" / "reports", "r", 1, verdicts.equivalent(B))
    run = load(find(tmp_path, latest=5))
    assert len(run.records) == 2
    assert run.history == {}


def test_a_test_that_left_no_record_once_is_missing_only_while_it_has_none(tmp_path: Path) -> None:
    gone = "t.py::gone"
    written(tmp_path, "r1", 1, verdicts.equivalent(A), lacking=CASE_B)
    written(tmp_path, "r2", 2, verdicts.equivalent(B), lacking=gone)
    assert load(find(tmp_path, latest=2)).missing == {gone: "unfinished"}


def test_the_latest_runs_of_each_reports_folder_are_found_the_oldest_first(tmp_path: Path) -> None:
    # Names against the dates: only the dates count.
    for home in ("p", "q"):
        for name, day in (("c", 1), ("b", 2), ("a", 3)):
            written(tmp_path / home, name, day, verdicts.equivalent(A))

    def found(latest: int) -> list[str]:
        paths = find(tmp_path, latest)
        return [f"{path.parents[1].name}{path.name}" for path in paths]

    assert [path.name for path in find(tmp_path / "p")] == ["a"]
    assert found(1) == ["pa", "qa"]
    assert found(2) == ["pb", "pa", "qb", "qa"]
    assert found(9) == ["pc", "pb", "pa", "qc", "qb", "qa"]
    assert find(tmp_path / "p" / "runs" / "c", 2) == [tmp_path / "p" / "runs" / "c"]


def test_a_folder_without_runs_is_an_error_however_many_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no run"):
        find(tmp_path, latest=3)
