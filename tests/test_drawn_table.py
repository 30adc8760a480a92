"""The table of drawn cases: what is added up, and what is too much."""

from __future__ import annotations

import pytest
from drawn_table import Tally

from equivtest.compare.verdict import Status


def counted(precision: str, **statuses: int) -> Tally:
    tally = Tally()
    tally.row("loops", precision).statuses.update(statuses)
    return tally


@pytest.mark.parametrize(
    ("precision", "inconclusive", "too_many"),
    [("fp32", 3, False), ("fp32", 4, True), ("bf16", 15, False), ("bf16", 16, True)],
)
def test_one_case_in_a_hundred_may_be_inconclusive_and_five_in_bf16(
    precision: str, inconclusive: int, too_many: bool
) -> None:
    tally = counted(precision, equivalent=300 - inconclusive, inconclusive=inconclusive)
    assert bool(tally.excess()) is too_many


def test_cases_that_did_not_run_do_not_count_as_judged() -> None:
    # 2 of the 100 that ran.
    tally = counted("fp16", **{"equivalent": 98, "inconclusive": 2, "not-run": 100})
    assert tally.excess() == [
        "loops: 2 of 200 cases in fp16 are inconclusive (2.0%, allowed 1%)",
    ]


def test_tallies_travel_as_text_and_add_up() -> None:
    total = counted("fp32", equivalent=3)
    total.row("loops", "fp32").margins["A"] = 0.5
    other = counted("fp32", equivalent=2, fault=1)
    other.row("loops", "fp32").margins.update(A=0.25, B=0.125)
    total.merge(Tally.read(other.text()))
    row = total.rows["loops", "fp32"]
    assert row.statuses == {Status.EQUIVALENT: 5, Status.FAULT: 1}
    assert row.margins == {"A": 0.5, "B": 0.125}
    assert total.lines()[1] == "6 cases: loops"
