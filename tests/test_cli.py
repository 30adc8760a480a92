"""``equivtest report``: pages from records, wherever they were made."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import equivtest
from equivtest.causes import Cause
from equivtest.cli import main
from equivtest.compare.verdict import Finding, Status
from equivtest.plan import Plan
from equivtest.report import comparing
from equivtest.report import record as records
from equivtest.report.run import RunFolder

sys.path.insert(0, str(Path(__file__).parent / "report"))
import verdicts

PLANS = {"a": Plan(4, 2, 2), "b": Plan(2, 4, 2)}


def shard(reports: Path, name: str, started: str = "2026-01-01T00:00:00+00:00") -> RunFolder:
    """A run of one case, and of one that left no record."""
    folder = RunFolder(reports, name, started)
    record = verdicts.record(verdicts.equivalent(PLANS[name]))
    records.write(record, folder.cases)
    folder.write_collected([record.nodeid, f"t.py::gone_{name}"])
    folder.write_ended({f"t.py::gone_{name}": "skipped"})
    return folder


def test_shards_of_several_machines_become_one_page(tmp_path: Path) -> None:
    for name in PLANS:
        shard(tmp_path / "shards" / name / "reports", name)
    assert main(["report", str(tmp_path / "shards"), "--out", str(tmp_path / "merged")]) == 0
    table = pd.read_csv(tmp_path / "merged" / "results.csv")
    assert list(table["A"]) == [2, 4]
    page = (tmp_path / "merged" / "divergence.html").read_text()
    assert "2 collected tests left no record (2 skipped)" in page


def test_of_a_reports_folder_the_latest_run_is_taken(tmp_path: Path) -> None:
    shard(tmp_path, "a", "2026-01-02T00:00:00+00:00")
    shard(tmp_path, "b", "2026-01-01T00:00:00+00:00")
    assert main(["report", str(tmp_path)]) == 0
    assert list(pd.read_csv(tmp_path / "results.csv")["A"]) == [2]


def test_a_run_folder_can_be_named(tmp_path: Path) -> None:
    run = shard(tmp_path, "b").path
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert list(pd.read_csv(tmp_path / "out" / "results.csv")["A"]) == [4]


def test_a_case_of_two_runs_counts_once_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = shard(tmp_path / "1", "a"), shard(tmp_path / "2", "a")
    folders = [str(first.path), str(second.path)]
    assert main(["report", *folders, "--out", str(tmp_path)]) == 0
    assert len(pd.read_csv(tmp_path / "results.csv")) == 1
    assert "1 case stood in several runs" in capsys.readouterr().out


def test_a_record_that_cannot_be_read_is_said_and_the_others_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shard(tmp_path, "a")
    (run.cases / "torn.json").write_text('{"schema": 9}')
    assert main(["report", str(tmp_path)]) == 0
    assert (
        "torn.json has schema 9, and this equivtest reads schemas 1, 2: a newer"
        in capsys.readouterr().out
    )
    assert "1 record could not be read" in (tmp_path / "divergence.html").read_text()


def test_a_folder_without_runs_is_an_error_that_says_what_to_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no run: pass a reports folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"equivtest {equivtest.__version__}\n"


def test_causes_are_printed_all_in_a_line_or_one_with_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["causes"]) == 0
    every = capsys.readouterr().out.splitlines()
    assert len(every) == len(Cause)
    assert any(line.split()[:2] == ["source.dropout", "source"] for line in every)
    assert main(["causes", "clip.missing"]) == 0
    (one,) = capsys.readouterr().out.splitlines()
    assert one.endswith(Cause.CLIP_MISSING.prose)
    assert main(["causes", "clip.mising"]) == 2
    assert "no cause is called clip.mising" in capsys.readouterr().err


def run_of_a(reports: Path, name: str, day: int, **changes: Any) -> Path:
    """A run of the first case alone, on that day of January."""
    folder = RunFolder(reports, name, f"2026-01-{day:02}T00:00:00+00:00")
    folder.cases.mkdir(parents=True)
    verdict = replace(verdicts.equivalent(PLANS["a"]), **changes)
    records.write(verdicts.record(verdict), folder.cases)
    folder.write_collected([])
    folder.write_ended({})
    return folder.path


FAULT = {"status": Status.FAULT, "findings": (Finding("clip.missing", "not clipped"),)}


def test_equal_runs_compare_with_status_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run_of_a(tmp_path, "r1", 1), run_of_a(tmp_path, "r2", 2, duration_s=99.0)
    assert main(["compare", str(old), str(new)]) == 0
    assert capsys.readouterr().out == (
        "1 case in both runs: no verdict changed, no margin moved, none added, none gone.\n"
        f"comparison: {tmp_path / 'comparison.html'}\n"
    )


def test_a_changed_verdict_compares_with_status_1_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run_of_a(tmp_path, "r1", 1), run_of_a(tmp_path, "r2", 2, **FAULT)
    assert main(["compare", str(old), str(new)]) == 1
    assert capsys.readouterr().out.startswith(
        "1 of 1 case changed its verdict (1 worse), 0 margins moved, 0 added, 0 gone.\n"
        "  ≠ worse: ragged · my_loop · m4-A2-D2 · fp32: was equivalent, now fault (clip.missing):"
    )
    assert main(["compare", str(new), str(old)]) == 1
    assert "(1 better)" in capsys.readouterr().out


def test_of_reports_folders_the_latest_runs_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of_a(tmp_path / "old", "r1", 1, **FAULT)
    run_of_a(tmp_path / "old", "r2", 2)
    run_of_a(tmp_path / "new", "r3", 3)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0


def test_shards_in_one_folder_are_one_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for side in ("old", "new"):
        for name in PLANS:
            shard(tmp_path / side / name, name)
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 cases in both runs: ")
    assert "old run: warning: 2 collected tests left no record (2 skipped)" in out
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "new" / "a")]) == 1
    assert "0 added, 1 gone." in capsys.readouterr().out


def test_a_run_is_not_compared_with_itself_and_the_two_latest_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = tmp_path / "reports"
    run_of_a(reports, "z", 1)
    before, after = run_of_a(reports, "y", 2), run_of_a(reports, "x", 3)
    for old, new in ((reports, reports), (after, reports), (reports, after)):
        assert main(["compare", str(old), str(new)]) == 2
        assert capsys.readouterr() == (
            "",
            "equivtest compare: OLD and NEW are the same run (of a reports folder the latest is "
            "taken): pass the folders of two runs, the latest two say: "
            f"{before.resolve()} {after.resolve()}\n",
        )


def test_a_single_run_is_not_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of_a(tmp_path, "r", 1)
    assert main(["compare", str(tmp_path), str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith(
        "pass the folders of two runs, <reports>/runs/<run id> each\n"
    )


@pytest.mark.parametrize("side", ["OLD", "NEW"])
def test_a_side_without_a_run_is_named(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = run_of_a(tmp_path / "good", "r", 1), tmp_path / "none"
    assert main(["compare", *map(str, (bad, good) if side == "OLD" else (good, bad))]) == 2
    assert capsys.readouterr().err == (
        f"equivtest compare: {side}: {bad} holds no run: pass a reports folder (with "
        "runs/<run id>/cases in it) or a run's own folder\n"
    )


@pytest.mark.parametrize("side", ["OLD", "NEW"])
def test_a_side_without_a_record_is_named(
    side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = run_of_a(tmp_path / "good", "r", 1), tmp_path / "bad"
    (bad / "cases").mkdir(parents=True)
    arguments = ["compare", *map(str, (bad, good) if side == "OLD" else (good, bad))]
    assert main(arguments) == 2
    assert capsys.readouterr().err == (
        f"equivtest compare: {side}: {bad} has no record that could be read: pass a run whose "
        "tests left records\n"
    )
    (bad / "cases" / "torn.json").write_text("{")
    assert main(arguments) == 2
    assert "torn.json is not JSON" in capsys.readouterr().err


def test_a_record_that_cannot_be_read_makes_a_comparison_incomplete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run_of_a(tmp_path, "r1", 1), run_of_a(tmp_path, "r2", 2)
    (new / "cases" / "torn.json").write_text("{")
    assert main(["compare", str(old), str(new)]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("1 case in both runs: ")
    assert "new run: warning: 1 record could not be read: " in out
    assert err == "equivtest compare: incomplete, for 1 of the records could not be read\n"


def test_a_report_takes_as_many_runs_as_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for day in (1, 2, 3):
        run_of_a(tmp_path, f"r{day}", day)
    assert main(["report", str(tmp_path)]) == 0
    assert "stood in several runs" not in capsys.readouterr().out
    assert main(["report", str(tmp_path), "--runs", "2"]) == 0
    assert "1 case stood in several runs; the latest counts" in capsys.readouterr().out
    assert "r2, r3" in (tmp_path / "divergence.html").read_text()


@pytest.mark.parametrize("number", ["0", "-1", "two"])
def test_a_number_of_runs_is_at_least_one(
    number: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["report", str(tmp_path), f"--runs={number}"])
    assert ended.value.code == 2
    assert f"{number!r}: pass a whole number, 1 or more" in capsys.readouterr().err


def test_a_name_that_no_terminal_writes_is_escaped_in_all_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "caf\udce9\x1b[31m\u202e\0"
    folder = RunFolder(tmp_path, "r", "2026-01-01T00:00:00+00:00")
    records.write(verdicts.record(verdicts.fault(PLANS["a"]), name), folder.cases)
    folder.write_ended({})
    assert main(["report", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "caf\\udce9\\x1b[31m\\u202e\\x00" in told
    assert not {"\x1b", "\u202e", "\0"} & set(told)
    assert b"\0" not in (tmp_path / "divergence.html").read_bytes()
    assert pd.read_csv(tmp_path / "results.csv").experiment[0].startswith("caf\\udce9")


def test_several_folders_are_merged_into_one_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in PLANS:
        shard(tmp_path / "shards" / name / "reports", name)
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/divergence.html").write_text("another")
    assert main(["report", "shards/a/reports", "shards/b/reports"]) == 0
    assert (tmp_path / "reports/divergence.html").read_text() == "another"
    assert (tmp_path / "reports/merged/divergence.html").is_file()


def test_a_new_run_that_did_not_end_is_no_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run_of_a(tmp_path, "r1", 1), run_of_a(tmp_path, "r2", 2)
    (new / "run.json").unlink()
    assert main(["compare", str(old), str(new)]) == 2
    assert "incomplete, for the new run did not end by itself" in capsys.readouterr().err


def test_what_goes_wrong_inside_is_no_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = run_of_a(tmp_path, "r1", 1), run_of_a(tmp_path, "r2", 2)

    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(comparing, "compare", broken)
    assert main(["compare", str(old), str(new)]) == 2
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().err
