"""What the terminal and CI say of a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import verdicts

from equivtest.compare.verdict import Finding
from equivtest.plan import Plan, plans
from equivtest.report.closing import append_step_summary
from equivtest.report.run import Run
from equivtest.report.summary import step_summary, terminal_lines, title

PLAN = Plan(4, 2, 2)


def run_of(*made: object, **more: object) -> Run:
    return Run(tuple(verdicts.record(verdict) for verdict in made), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (run_of(), "No case left a record."),
        (run_of(verdicts.equivalent(PLAN)), "1 case is as expected."),
        (
            run_of(verdicts.equivalent(PLAN), verdicts.not_run(PLAN)),
            "1 case is as expected; 1 could not be run here.",
        ),
        (run_of(verdicts.not_run(PLAN)), "No case was run; 1 could not be run here."),
        (
            run_of(verdicts.fault(PLAN), verdicts.equivalent(PLAN, "fp64")),
            "1 of 2 cases is not as expected.",
        ),
        (
            run_of(verdicts.fault(PLAN), verdicts.fault(PLAN, "fp64")),
            "2 of 2 cases are not as expected; all of them: differs.gradient.",
        ),
        (
            run_of(verdicts.fault(PLAN), verdicts.error(PLAN, "fp64")),
            "2 of 2 cases are not as expected; 1 of them: differs.gradient; 1 error.",
        ),
        (
            run_of(verdicts.not_run(PLAN), verdicts.not_run(Plan(2, 4, 2))),
            "No case was run; 2 could not be run here.",
        ),
    ],
)
def test_the_title_says_what_the_counts_say(run: Run, expected: str) -> None:
    assert title(run) == expected


def test_a_long_list_of_failures_fits_a_screen() -> None:
    made = [
        verdicts.fault(plan, precision, findings=(Finding(f"cause.{plan.A}", "x " * 400),))
        for plan in plans(64)
        for precision in ("fp32", "fp64")
    ]
    lines = terminal_lines(run_of(*made, missing=dict.fromkeys("abcdefg", "unfinished")), Path("p"))
    assert len(lines) <= 30
    assert max(map(len, lines)) <= 120
    assert lines[-1] == "report: p"


def test_equal_failures_are_one_finding() -> None:
    lines = terminal_lines(run_of(*[verdicts.fault(p) for p in plans(32, max_D=4)[6:]]), Path("p"))
    assert sum("≠ ragged" in line for line in lines) == 1
    assert any("9 cases (9 plans; fp32)" in line for line in lines)


def test_the_step_summary_cannot_break_its_table(tmp_path: Path) -> None:
    record = verdicts.record(
        verdicts.fault(PLAN, findings=(Finding("", "w.x | b\n| c | <b> `x`"),)), experiment="e|f"
    )
    text = step_summary(Run((record,)))
    rows = [line for line in text.splitlines() if "e\\|f" in line]
    assert len(rows) == 1
    assert rows[0].replace("\\|", "").count("|") == 5
    assert r"w.x \| b \| c \| \<b\> \`x\`" in rows[0]


def test_the_step_summary_is_appended(tmp_path: Path) -> None:
    target = tmp_path / "summary.md"
    target.write_text("before\n")
    append_step_summary(run_of(verdicts.equivalent(PLAN)), {"GITHUB_STEP_SUMMARY": str(target)})
    assert target.read_text().startswith("before\n### equivtest: 1 case is as expected.")
    append_step_summary(run_of(verdicts.equivalent(PLAN)), {})
