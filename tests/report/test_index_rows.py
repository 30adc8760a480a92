"""The index: which cases are one row, what it says of them and how it is sorted."""

from __future__ import annotations

import math
from typing import Any

import pytest
import verdicts

from equivtest.compare.verdict import Finding, Status, Verdict
from equivtest.plan import Plan, plans
from equivtest.report.index import IndexRow, index
from equivtest.report.record import Record

PLAN = Plan(4, 2, 2)


def rows(*made: Verdict | Record) -> list[IndexRow]:
    return index([m if isinstance(m, Record) else verdicts.record(m) for m in made])


def test_cases_that_say_the_same_are_one_row_with_the_figures_of_the_worst() -> None:
    (row,) = rows(*(verdicts.equivalent(p, margin=0.1 * p.A) for p in plans(8, max_D=1)))
    assert (row.cases, row.plans) == (4, "all plans")
    assert row.worst.verdict.card.plan == "m1-A8-D1"
    assert (row.margin, row.order) == ("0.80", pytest.approx(0.8))
    assert (row.distance, row.tolerance, row.floor) == ("2.0e-7", "2.5e-7", "2.2e-7")
    assert row.words == "m1-A8-D1 m2-A4-D1 m4-A2-D1 m8-A1-D1"


@pytest.mark.parametrize(
    "other",
    [
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2)), "another"),
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2)), loop="another"),
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2)), wrap="another"),
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2), "fp64")),
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2), expect=("clip.missing",))),
        verdicts.record(verdicts.fault(Plan(2, 4, 2))),
    ],
)
def test_cases_that_differ_in_what_a_row_says_are_two(other: Record) -> None:
    assert len(rows(verdicts.equivalent(PLAN), other)) == 2


def test_plans_are_told_of_those_that_ran() -> None:
    good, bad = verdicts.equivalent, verdicts.fault
    found = rows(good(Plan(8, 1, 1)), good(Plan(4, 2, 1)), bad(Plan(2, 4, 1)))
    assert [row.plans for row in found] == ["m2-A4-D1", "2 of 3 plans"]
    assert [row.plans for row in rows(bad(PLAN))] == [str(PLAN)]
    # the same plan under another precision is not another plan
    assert [row.plans for row in rows(bad(PLAN), good(PLAN, "fp64"))] == [str(PLAN)] * 2


def test_failures_first_then_what_could_not_be_run_then_the_nearest_to_tolerance() -> None:
    found = rows(
        verdicts.equivalent(PLAN, "fp64", margin=0.1),
        verdicts.equivalent(PLAN, "fp32", margin=0.9),
        verdicts.not_run(PLAN),
        verdicts.error(PLAN, "bf16"),
        verdicts.fault(PLAN, "fp16"),
    )
    assert [row.precision for row in found] == ["fp16", "bf16", "tf32", "fp32", "fp64"]
    assert [row.expected[0] for row in found] == list("✗✗–✓✓")


def test_the_wrapper_is_named_where_it_is_not_the_usual() -> None:
    usual, own = (
        verdicts.record(verdicts.equivalent(PLAN), wrap=w)
        for w in ("DistributedDataParallel", "my_wrap")
    )
    assert [row.loop for row in index([usual, own])] == ["my_loop", "my_loop, my_wrap"]


@pytest.mark.parametrize(
    ("found", "margin", "order"),
    [
        ((), "–", -1.0),
        ((verdicts.tensor("a", 0, 7.0, state="not judged"),), "–", -1.0),
        ((verdicts.tensor("a", replay_distance=math.nan),), "NaN", 1e308),
        ((verdicts.tensor("a", replay_distance=math.inf),), "inf", 1e308),
        ((verdicts.tensor("a", 0, 7.0),), "7.00", pytest.approx(7.0)),
    ],
)
def test_what_is_not_a_number_sorts_first_and_what_was_not_judged_last(
    found: tuple[Any, ...], margin: str, order: float
) -> None:
    (row,) = rows(verdicts.fault(PLAN, rows=found))
    assert (row.margin, row.order) == (margin, order)
    assert math.isfinite(row.order)
    assert math.isfinite(row.distance_order)


def test_without_a_cause_the_row_says_why() -> None:
    def told(verdict: Verdict) -> str:
        return rows(verdict)[0].told

    assert told(verdicts.fault(PLAN)) == told(verdicts.equivalent(PLAN)) == ""
    assert told(verdicts.not_run(PLAN)) == "tf32 needs a CUDA device"
    assert told(verdicts.error(PLAN)) == "rank 1 raised RuntimeError: boom"
    text = "x" * 90
    made = {"status": Status.UNEXPLAINED, "findings": (Finding("", text),)}
    assert told(verdicts.equivalent(PLAN, **made)) == text
    made["findings"] = (Finding("", f"{text}x"),)
    assert told(verdicts.equivalent(PLAN, **made)) == f"{'x' * 88} …"


def test_words_name_the_planted_fault() -> None:
    (row,) = rows(verdicts.record(verdicts.fault(PLAN), planted="clip.missing/late"))
    assert row.words.startswith(f"{PLAN} clip.missing/late 8 of 8 tensors are beyond tolerance")


def test_no_cases_are_no_rows() -> None:
    assert index([]) == []
