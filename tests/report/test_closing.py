"""Whether a run has compared anything."""

from __future__ import annotations

from dataclasses import replace

from verdicts import equivalent, not_run, record

from equivtest.compare.verdict import Failure
from equivtest.devices import NO_DEVICE
from equivtest.plan import Plan
from equivtest.report.closing import not_compared
from equivtest.report.run import Run

PLAN = Plan(2, 2, 2)
WITHOUT_DEVICE = record(replace(not_run(PLAN), failure=Failure(NO_DEVICE)), id="a")


def test_cases_that_all_lack_a_device_were_not_compared_for_that_reason() -> None:
    assert not_compared(Run((WITHOUT_DEVICE,))) == "no CUDA device: nothing was compared"


def test_cases_that_were_not_run_for_several_reasons_were_not_compared() -> None:
    found = not_compared(Run((WITHOUT_DEVICE, record(not_run(PLAN), id="b"))))
    assert found == "nothing was compared: all 2 cases could not be run here"


def test_one_case_that_ran_is_a_comparison() -> None:
    assert not_compared(Run((WITHOUT_DEVICE, record(equivalent(PLAN), id="b")))) == ""
    assert not_compared(Run(())) == ""
