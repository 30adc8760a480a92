"""``results.csv``: the columns that scripts outside the project rely on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest
import verdicts

from equivtest.plan import Plan
from equivtest.report.results import results, write_csv, write_parquet

# Written out, not imported: this is the contract of the design, in its order.
COLUMNS = [
    "id",
    "experiment",
    "loop",
    "wrap",
    "m",
    "A",
    "D",
    "precision",
    "device",
    "backend",
    "optimizer",
    "status",
    "expected",
    "passed",
    "cause",
    "expected_cause",
    "notes",
    "margin",
    "replay_margin",
    "split_margin",
    "oracle_margin",
    "worst_tensor",
    "distance",
    "tolerance",
    "noise_floor",
    "loss",
    "oracle_loss",
    "microbatches",
    "updates_attempted",
    "updates_applied",
    "examples",
    "supervised",
    "null_tensors",
    "blind_tensors",
    "first_peak_bytes",
    "later_peak_bytes",
    "duration_s",
]


def test_columns_are_those_of_the_design_in_its_order(tmp_path: Path) -> None:
    write_csv(results([verdicts.record(verdicts.fault(Plan(4, 2, 2)))]), tmp_path / "results.csv")
    assert list(pd.read_csv(tmp_path / "results.csv").columns) == COLUMNS


def test_a_fault_in_figures(tmp_path: Path) -> None:
    verdict = verdicts.fault(Plan(4, 2, 2), expect=("clip.missing", "differs.gradient"))
    write_csv(results([verdicts.record(verdict)]), tmp_path / "results.csv")
    row = pd.read_csv(tmp_path / "results.csv").iloc[0]
    assert (row.m, row.A, row.D) == (4, 2, 2)
    assert row.status == "fault"
    assert row.passed
    assert row.cause == "differs.gradient;clip.missing"
    assert row.expected_cause == "clip.missing;differs.gradient"
    assert row.worst_tensor == "embedding.weight"
    assert row.distance / row.tolerance == row.margin == 5.3e4
    assert row.microbatches == 8
    assert row.loss == 3.412345


def test_counts_stay_whole_beside_a_case_without_any(tmp_path: Path) -> None:
    made = [verdicts.equivalent(Plan(4, 2, 2)), verdicts.not_run(Plan(4, 2, 2))]
    made[1] = verdicts.not_run(Plan(2, 4, 2))
    object.__setattr__(made[1].card, "microbatches", None)
    write_csv(results(map(verdicts.record, made)), tmp_path / "results.csv")
    column = pd.read_csv(tmp_path / "results.csv", dtype=str, keep_default_na=False).microbatches
    assert list(column) == ["8", ""]


def test_order_is_that_of_the_matrix_whatever_order_the_records_come_in() -> None:
    plans = [Plan(16, 1, 1), Plan(2, 8, 1), Plan(8, 1, 2), Plan(1, 8, 2)]
    made = [verdicts.record(verdicts.equivalent(p, q)) for q in ("fp64", "fp32") for p in plans]
    table = results(reversed(made))
    assert list(table["precision"]) == ["fp64"] * 4 + ["fp32"] * 4
    assert list(zip(table["D"], table["A"], strict=True))[:4] == [(1, 1), (1, 8), (2, 1), (2, 8)]
    assert results(made).equals(table)


def test_parquet_holds_the_same_table_with_numbers_as_numbers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="no pyarrow here: pip install equivtest[parquet]")
    made = [
        verdicts.fault(Plan(4, 2, 2)),
        verdicts.not_run(Plan(2, 4, 2)),
        verdicts.nothing_finite(Plan(8, 1, 2)),
    ]
    table = results(map(verdicts.record, made))
    assert write_parquet(table, tmp_path / "results.parquet")
    write_csv(table, tmp_path / "results.csv")
    read = pd.read_parquet(tmp_path / "results.parquet")
    assert list(read.columns) == COLUMNS
    assert list(read["id"]) == list(table["id"])
    kinds = {name: read[name].dtype.kind for name in ("A", "margin", "passed", "microbatches")}
    assert kinds == {"A": "i", "margin": "f", "passed": "b", "microbatches": "i"}
    assert read["margin"].max() == 5.3e4
    assert read["m"].tolist() == table["m"].tolist()
    assert write_parquet(results([]), tmp_path / "empty.parquet")
    assert (pd.read_parquet(tmp_path / "empty.parquet").dtypes == read.dtypes).all()


def test_without_pyarrow_there_is_no_parquet_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not write_parquet(results([]), tmp_path / "results.parquet")
    assert list(tmp_path.iterdir()) == []
