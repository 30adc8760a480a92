"""``equivtest faults``: the table of planted faults, from records."""

from __future__ import annotations

from pathlib import Path

import pytest
import verdicts

from equivtest.cli import main
from equivtest.compare.verdict import Finding, Status, Verdict
from equivtest.plan import Plan
from equivtest.report import record as records
from equivtest.report.planted import outcomes
from equivtest.report.record import Record
from equivtest.report.run import RunFolder

PLAN = Plan(4, 3, 2)
ONLY_LAST, EXTRA = "accum.only_last", "sync.extra"


def on(planted: str, verdict: Verdict, precision: str = "fp64") -> Record:
    return verdicts.record(
        verdict, id=f"{planted}-{precision}-{verdict.status}", planted=planted, loop="loop"
    )


def with_causes(*causes: str, expect: str, status: Status = Status.FAULT) -> Verdict:
    found = tuple(Finding(cause, "seen") for cause in causes)
    return verdicts.equivalent(PLAN, status=status, findings=found, expect=(expect,))


@pytest.mark.parametrize(
    ("planted", "verdict", "outcome"),
    [
        (ONLY_LAST, with_causes(ONLY_LAST, expect=ONLY_LAST), "named"),
        (f"{ONLY_LAST}/by_hand", with_causes(ONLY_LAST, expect=ONLY_LAST), "named"),
        (ONLY_LAST, with_causes("differs.gradient", expect=ONLY_LAST), "caught"),
        # named, and another beside it that nobody planted
        (ONLY_LAST, with_causes(ONLY_LAST, "sync.never", expect=ONLY_LAST), "caught"),
        (ONLY_LAST, verdicts.equivalent(PLAN, expect=(ONLY_LAST,)), "missed"),
        (ONLY_LAST, verdicts.not_run(PLAN), "not run"),
        (EXTRA, verdicts.equivalent(PLAN, expect=(EXTRA,), notes=(f"{EXTRA}: 3 of 1",)), "named"),
        (EXTRA, verdicts.equivalent(PLAN, expect=(EXTRA,)), "missed"),
    ],
)
def test_what_became_of_a_planted_fault(planted: str, verdict: Verdict, outcome: str) -> None:
    (found,) = outcomes([on(planted, verdict)])
    assert (found.planted, found.plan, found.outcome) == (planted, str(PLAN), outcome)


def test_a_loop_that_is_nobodys_plant_is_not_in_the_table() -> None:
    assert outcomes([verdicts.record(verdicts.fault(PLAN))]) == []


def test_the_table_is_printed_from_the_records_of_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, "a", "2026-01-01T00:00:00+00:00")
    for one in (
        on(ONLY_LAST, with_causes(ONLY_LAST, expect=ONLY_LAST)),
        on(EXTRA, verdicts.equivalent(PLAN, expect=(EXTRA,))),
    ):
        records.write(one, folder.cases)
    assert main(["faults", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "planted          class  experiment  plan      fp32",
        "sync.extra       cost   ragged      m4-A3-D2  missed",
        "accum.only_last  fault  ragged      m4-A3-D2  named",
        "",
        "not named:",
        "  sync.extra in ragged, m4-A3-D2, fp32: equivalent, nothing named",
        "",
        "      planted  caught  named",
        "fp32  2        1       1",
        "all   2        1       1",
    ]


def test_a_run_without_planted_faults_says_what_to_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path, "a", "2026-01-01T00:00:00+00:00")
    records.write(verdicts.record(verdicts.fault(PLAN)), folder.cases)
    assert main(["faults", str(tmp_path)]) == 2
    assert "planted none: run pytest cases/faults first" in capsys.readouterr().err


def test_a_record_keeps_what_was_planted() -> None:
    one = on(ONLY_LAST, verdicts.fault(PLAN))
    assert records.from_json(records.to_json(one)).planted == ONLY_LAST
