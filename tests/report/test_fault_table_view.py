"""The fault table on the page: signs, counts and every case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verdicts
from panel_drawing import Drawings

from equivtest.causes import Cause, Kind
from equivtest.compare.verdict import Finding, Verdict
from equivtest.plan import Plan
from equivtest.report.faulttable import FaultTable, fault_table
from equivtest.report.page import render_page
from equivtest.report.record import Record
from equivtest.report.run import Run

PLAN = Plan(4, 3, 2)
LAST, EXTRA = "accum.only_last", "sync.extra"
NUMBER = iter(range(1000))


def on(planted: str, verdict: Verdict, experiment: str = "ragged") -> Record:
    name = f"t.py::{next(NUMBER)}"
    return verdicts.record(verdict, experiment, id=name, nodeid=name, planted=planted)


def named(precision: str = "fp32", plan: Plan = PLAN) -> Record:
    found = (Finding(LAST, "seen"),)
    return on(LAST, verdicts.fault(plan, precision, findings=found, expect=(LAST,)))


def caught(precision: str = "fp32") -> Record:
    found = (Finding("differs.gradient", "seen"),)
    return on(LAST, verdicts.fault(PLAN, precision, findings=found, expect=(LAST,)))


def missed(precision: str = "fp32") -> Record:
    return on(LAST, verdicts.equivalent(PLAN, precision, expect=(LAST,)))


def not_run(precision: str = "fp32") -> Record:
    return on(LAST, verdicts.not_run(PLAN, precision))


def table(*records: Record) -> FaultTable:
    made = fault_table(records)
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("records", "title"),
    [
        ((named(),), "1 case with a planted fault ran: 1 caught, 1 called by its name"),
        (
            (named(), named("fp64"), caught("bf16"), missed("fp16"), not_run("tf32")),
            "4 cases with a planted fault ran: 3 caught, 2 called by its name",
        ),
        ((not_run(),), "0 cases with a planted fault ran: 0 caught, 0 called by its name"),
    ],
)
def test_the_title_counts_cases_that_ran(records: tuple[Record, ...], title: str) -> None:
    assert table(*records).title == title


def test_totals_by_precision_in_the_order_of_exactness_and_all_of_them_last() -> None:
    made = table(caught("bf16"), named("fp64"), missed("fp64"), not_run("fp32"))
    assert made.precisions == ("fp64", "fp32", "bf16")
    assert made.totals == (
        ("fp64", 2, 1, 1),
        ("fp32", 0, 0, 0),
        ("bf16", 1, 1, 0),
        ("all", 3, 2, 1),
    )


@pytest.mark.parametrize(
    ("records", "sign", "whole"),
    [
        ((named(), named("fp64")), "✓", True),
        ((named(), not_run("tf32")), "✓", True),
        ((not_run(),), "–", True),
        ((named(), caught("fp64")), "○", False),
        ((caught(), missed("fp64")), "✗", False),
        ((named(), missed("fp64")), "✗", False),
    ],
)
def test_a_faults_sign_is_of_the_worst_that_became_of_it(
    records: tuple[Record, ...], sign: str, whole: bool
) -> None:
    (fault,) = table(*records).faults
    assert (fault.sign, fault.whole) == (sign, whole)
    html = Drawings(render_page(Run(records))).html
    opened = "" if whole else " open"
    assert f'<details class="plant"{opened}><summary><span class="symbol">{sign}</span>' in html


def test_counts_are_of_what_ran() -> None:
    other = Plan(2, 6, 2)
    made = table(
        named("fp64"),
        named("fp64", other),
        caught("fp32"),
        missed("fp16"),
        not_run("tf32"),
        on(EXTRA, verdicts.equivalent(PLAN, "bf16", notes=(f"{EXTRA}: 3",), expect=(EXTRA,))),
    )
    counts = {fault.planted: fault.counts for fault in made.faults}
    assert made.precisions == ("fp64", "fp32", "tf32", "fp16", "bf16")
    assert counts[LAST] == ("2 of 2", "0 of 1", "not run", "0 of 1, 1 missed", "–")
    assert counts[EXTRA] == ("–", "–", "–", "–", "1 of 1")


def test_each_case_is_a_cell_that_says_what_was_found_where_it_is_not_named() -> None:
    made = table(named("fp64"), caught("fp32"), missed("bf16"))
    (row,) = made.faults[0].rows
    assert (row.experiment, row.plan) == ("ragged", str(PLAN))
    assert [(cell.sign, cell.outcome, cell.told) for cell in row.cells if cell] == [
        ("✓", "named", ""),
        ("○", "caught", "fault, differs.gradient"),
        ("✗", "missed", "equivalent, nothing named"),
    ]


def test_a_place_without_a_case_is_empty() -> None:
    made = table(named("fp64"), named("fp32", Plan(2, 6, 2)))
    assert [[cell is not None for cell in row.cells] for row in made.faults[0].rows] == [
        [False, True],
        [True, False],
    ]


def test_a_second_case_of_the_same_place_hides_none() -> None:
    (fault,) = table(missed(), named(), named("fp64")).faults
    cells = [cell.sign for row in fault.rows for cell in row.cells if cell]
    assert sorted(cells) == sorted("✓✓✗")
    assert len(fault.rows) == 2


def test_ways_to_plant_one_fault_are_faults_of_their_own() -> None:
    records = [named(), on(f"{LAST}/by_hand", verdicts.fault(PLAN))]
    assert [fault.planted for fault in table(*records).faults] == [LAST, f"{LAST}/by_hand"]


def test_a_plant_of_no_known_cause_is_listed_last() -> None:
    made = table(on("no.such", verdicts.fault(PLAN)), named())
    assert [(fault.planted, fault.kind) for fault in made.faults] == [
        (LAST, "fault"),
        ("no.such", "–"),
    ]


def test_a_run_that_planted_nothing_has_no_table() -> None:
    assert fault_table([verdicts.record(verdicts.fault(PLAN))]) is None


def test_a_page_of_many_faults_tells_the_counts_of_each_by_precision() -> None:
    others = [str(cause) for cause in Cause if cause.kind is Kind.FAULT and cause != LAST]
    causes = [LAST, *others[:11]]
    records = [
        replace(one, id=f"{one.id}-{cause}-{precision}", planted=cause)
        for cause in causes
        for precision in ("fp64", "fp32")
        for one in [named(precision)]
    ]
    html = render_page(Run(tuple(records)))
    assert html.count('<details class="plant"') == 12
    assert html.count(" · fp64 0 of 1 · fp32 0 of 1") == 11  # each planted another than is named
    assert html.count(" · fp64 1 of 1 · fp32 1 of 1") == 1
