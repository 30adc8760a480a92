"""``equivtest report``: pages from records, wherever they were made."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest

import equivtest
from equivtest.causes import Cause
from equivtest.cli import main
from equivtest.plan import Plan
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
    assert "torn.json has schema 9, and this equivtest reads schema 1" in capsys.readouterr().out
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
