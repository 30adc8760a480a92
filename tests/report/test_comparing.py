"""Two runs beside each other: what changed, in which order, and what is only noise."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import verdicts

from equivtest.compare.verdict import Failure, Finding, Status, Verdict
from equivtest.plan import Plan, plans
from equivtest.report.compared import lines
from equivtest.report.comparing import Change, Comparison, compare, moved_by
from equivtest.report.environment import Difference
from equivtest.report.record import Record
from equivtest.report.run import Run

ROOT = Path(__file__).parents[2]
PLAN = Plan(4, 2, 2)
RIGHT = verdicts.equivalent(PLAN)
FAULT = verdicts.fault(PLAN)
NOT_RUN = verdicts.not_run(PLAN, "fp32")
CLIP = verdicts.fault(PLAN, findings=(Finding("clip.missing", "The norm is 2.25, the bound 1."),))
SCALE = Finding("differs.gradient", "Every tensor is half of what it should be.")


def cases(**made: Verdict) -> tuple[Record, ...]:
    """Records that are called as the arguments are."""
    return tuple(verdicts.record(v, id=name, nodeid=name) for name, v in made.items())


def of(old: Verdict, new: Verdict) -> Comparison:
    return compare(Run(cases(a=old)), Run(cases(a=new)))


def ids(found: Any) -> list[str]:
    return [(getattr(one, "new", None) or one).id for one in found]


def with_margin(margin: float, **row: Any) -> Verdict:
    """A verdict of one tensor, whose margin is exact: its tolerance is 1."""
    values: dict[str, Any] = {"replay_distance": margin, "replay_tolerance": 1.0, "state": "equal"}
    return verdicts.equivalent(PLAN, rows=(verdicts.tensor("w", **(values | row)),))


def by_oracle(margin: float, floor: float) -> Verdict:
    """One whose margin is of C: beyond A, acquitted by the oracle."""
    return with_margin(
        2.0,
        state="rounding",
        oracle_distance=margin,
        oracle_tolerance=1.0,
        noise_floor=floor,
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (RIGHT, RIGHT, None),
        (FAULT, FAULT, None),
        (NOT_RUN, NOT_RUN, None),
        (RIGHT, FAULT, Change.WORSE),
        (RIGHT, verdicts.error(PLAN), Change.WORSE),
        (FAULT, RIGHT, Change.BETTER),
        (FAULT, verdicts.error(PLAN), Change.OTHER),
        (FAULT, CLIP, Change.OTHER),
        (RIGHT, replace(CLIP, expect=("clip.missing",)), Change.OTHER),
        (RIGHT, NOT_RUN, Change.NOT_RUN),
        (FAULT, NOT_RUN, Change.NOT_RUN),
        (NOT_RUN, RIGHT, Change.NOW_RUN),
        (NOT_RUN, FAULT, Change.NOW_RUN),
        (NOT_RUN, replace(NOT_RUN, expect=("not-run",)), Change.OTHER),
        (RIGHT, replace(RIGHT, expect=("fault",)), Change.WORSE),
        (replace(RIGHT, expect=("fault",)), RIGHT, Change.BETTER),
        (FAULT, replace(FAULT, findings=FAULT.findings[::-1]), None),
        (FAULT, replace(FAULT, notes=(), findings=FAULT.findings[:1]), Change.OTHER),
    ],
)
def test_a_verdict_changed_where_status_causes_or_passed_did(
    old: Verdict, new: Verdict, expected: Change | None
) -> None:
    found = of(old, new)
    assert [case.change for case in found.changed] == ([expected] if expected else [])
    assert found.same is (expected is None)
    assert found.counts[Change.WORSE] == (expected is Change.WORSE)


def test_changed_verdicts_are_shown_by_kind_then_by_how_far_they_moved() -> None:
    old = cases(
        a_better=FAULT,
        b_not_run=RIGHT,
        c_other=FAULT,
        d_worse_a_bit=RIGHT,
        e_worse_much=RIGHT,
        f_worse_nan=RIGHT,
        g_run_right=NOT_RUN,
        h_run_wrong=NOT_RUN,
        i_worse_a_bit=RIGHT,
    )
    new = cases(
        a_better=RIGHT,
        b_not_run=NOT_RUN,
        c_other=CLIP,
        d_worse_a_bit=verdicts.fault(PLAN, margin=4.0),
        e_worse_much=verdicts.fault(PLAN, margin=1e6),
        f_worse_nan=verdicts.fault(PLAN, rows=()),
        g_run_right=RIGHT,
        h_run_wrong=FAULT,
        i_worse_a_bit=verdicts.fault(PLAN, margin=4.0),
    )
    expected = [
        "f_worse_nan",
        "e_worse_much",
        "d_worse_a_bit",
        "i_worse_a_bit",
        "h_run_wrong",
        "g_run_right",
        "b_not_run",
        "c_other",
        "a_better",
    ]
    assert ids(compare(Run(old), Run(new)).changed) == expected
    assert ids(compare(Run(old[::-1]), Run(new[::-1])).changed) == expected
    assert compare(Run(old), Run(new)).counts == {
        Change.WORSE: 4,
        Change.NOW_RUN: 2,
        Change.NOT_RUN: 1,
        Change.OTHER: 1,
        Change.BETTER: 1,
    }


@pytest.mark.parametrize(
    ("old", "new", "moved"),
    [
        (0.25, 0.5, False),
        (0.25, 0.5 + 2**-10, True),
        (0.5, 0.25, False),
        (0.5 + 2**-10, 0.25, True),
        (0.5, math.inf, True),
        (math.inf, 0.5, True),
        (0.5, math.nan, True),
        (math.nan, 0.5, True),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
        (math.inf, math.nan, False),
    ],
)
def test_a_margin_moved_where_it_moved_by_more_than_rounding(
    old: float, new: float, moved: bool
) -> None:
    found = of(with_margin(old), with_margin(new))
    assert [case.noise for case in found.moved] == ([0.25] if moved else [])
    assert found.changed == ()
    assert (found.unchanged, found.same) == ((0, False) if moved else (1, True))


def test_between_margins_that_are_not_finite_nothing_moved() -> None:
    infinite, broken = with_margin(math.inf), with_margin(math.nan)
    assert moved_by(infinite, infinite) == moved_by(infinite, broken) == 0.0
    assert moved_by(RIGHT, infinite) == moved_by(broken, RIGHT) == math.inf
    assert moved_by(with_margin(0.75), with_margin(0.5)) == 0.25


def test_a_case_without_rows_has_no_margin_that_moves() -> None:
    error = verdicts.error(PLAN)
    assert of(error, error).same
    assert len(of(verdicts.fault(PLAN, rows=()), FAULT).moved) == 1


@pytest.mark.parametrize(
    ("old_floor", "new_floor", "noise"),
    [(0.0625, 0.0625, 0.25), (0.0625, 0.5, 0.5), (0.5, 0.0625, 0.5), (math.inf, 0.5, 0.5)],
)
def test_noise_is_the_larger_floor_of_the_worst_tensors(
    old_floor: float, new_floor: float, noise: float
) -> None:
    start = 0.125
    within = of(by_oracle(start, old_floor), by_oracle(start + noise, new_floor))
    assert within.same
    beyond = of(by_oracle(start, old_floor), by_oracle(start + noise + 2**-10, new_floor))
    assert [case.noise for case in beyond.moved] == [noise]


def test_the_floor_of_the_oracle_hides_no_move_against_the_replay() -> None:
    # In mixed precision it is thousands of the replay's tolerances.
    found = of(with_margin(0.125, noise_floor=1e4), with_margin(0.75, noise_floor=1e4))
    assert [case.noise for case in found.moved] == [0.25]


def test_margins_that_rose_come_first_then_the_largest_move() -> None:
    start = with_margin(0.5)
    moves = {"a": 0.125, "b": 0.0, "c": 0.8125, "d": 0.9375, "e": math.nan, "f": 0.8125}
    old = cases(**dict.fromkeys(moves, start))
    new = cases(**{name: with_margin(margin) for name, margin in moves.items()})
    found = compare(Run(old), Run(new[::-1]))
    assert ids(found.moved) == ["e", "d", "c", "f", "b", "a"]
    assert [case.rose for case in found.moved] == [True] * 4 + [False] * 2


def test_a_case_whose_verdict_changed_is_not_among_the_margins() -> None:
    found = of(RIGHT, FAULT)
    assert (len(found.changed), len(found.moved)) == (1, 0)


def test_cases_of_one_run_alone_are_gone_or_added_the_worst_first() -> None:
    old = Run(cases(a=RIGHT, b=RIGHT, c=FAULT, d=NOT_RUN))
    new = Run(cases(a=RIGHT, e=NOT_RUN, f=verdicts.error(PLAN), g=FAULT, h=RIGHT))
    found = compare(old, new)
    assert ids(found.gone) == ["c", "d", "b"]
    assert ids(found.added) == ["g", "f", "e", "h"]
    assert (found.matched, found.unchanged, found.same) == (1, 1, False)


@pytest.mark.parametrize(("old", "new"), [("ab", "a"), ("a", "ab")])
def test_one_case_more_or_less_is_not_the_same(old: str, new: str) -> None:
    runs = [Run(cases(**dict.fromkeys(names, RIGHT))) for names in (old, new)]
    assert compare(*runs).same is False


def test_the_environments_of_shards_are_compared_as_sets() -> None:
    def run(*environments: dict[str, str]) -> Run:
        made = cases(**dict.fromkeys("abc"[: len(environments)], RIGHT))
        pairs = zip(made, environments, strict=True)
        return Run(tuple(replace(record, environment=values) for record, values in pairs))

    old = run(
        {"torch": "2.13.0", "device": "CPU", "cpus": "4", "python": "3.11"},
        {"torch": "2.12.1", "device": "CPU", "cpus": "8", "python": "3.11"},
    )
    new = run(
        {"torch": "2.13.0", "device": "CPU", "cpus": "8", "driver": "580"},
        {"torch": "2.13.0", "device": "CPU", "cpus": "4", "driver": "580"},
    )
    found = compare(old, new)
    assert found.environment == (
        Difference("torch", "2.12.1 / 2.13.0", "2.13.0"),
        Difference("python", "3.11", None),
        Difference("driver", None, "580"),
    )
    assert found.same
    assert lines(found)[1:] == [
        "environment:",
        "  torch: was 2.12.1 / 2.13.0, now 2.13.0",
        "  python: 3.11, only in the old run",
        "  driver: 580, only in the new run",
    ]


def test_what_limits_a_comparison_is_said_of_each_run() -> None:
    old = Run(cases(a=RIGHT), unreadable=("x.json is not JSON",), missing={"t.py::b": "skipped"})
    new = Run(cases(a=RIGHT), ended=False)
    found = compare(old, new)
    assert found.notes == (
        "old run: warning: 1 collected test left no record (1 skipped): t.py::b",
        "old run: warning: 1 record could not be read: x.json is not JSON",
        "new run: warning: the session did not end by itself: there may be more cases than here",
    )
    assert lines(found)[1:] == list(found.notes)
    assert (found.old.missing, found.new.missing) == ({"t.py::b": "skipped"}, {})
    assert compare(new, new).notes != ()
    assert compare(Run(cases(a=RIGHT)), Run(cases(a=FAULT))).notes == ()


def test_runs_without_a_case_in_common_are_said_to_be_so() -> None:
    (note,) = compare(Run(cases(a=RIGHT)), Run(cases(b=RIGHT))).notes
    assert note.startswith("note: no case is in both runs: ")


def test_the_terminal_says_what_changed_in_sentences() -> None:
    old = cases(a=RIGHT, b=RIGHT, c=FAULT, d=with_margin(0.125), e=RIGHT, f=RIGHT, g=RIGHT)
    new = cases(
        a=CLIP,
        b=NOT_RUN,
        c=RIGHT,
        d=with_margin(0.75),
        e=replace(RIGHT, expect=("fault",)),
        f=RIGHT,
        h=FAULT,
    )
    case = "ragged · my_loop · m4-A2-D2 · fp32"
    text = lines(compare(Run(old), Run(new)))
    assert text[0] == (
        "4 of 6 cases changed their verdict (2 worse, 1 not run any more, 1 better), "
        "1 margin moved, 1 added, 1 gone."
    )
    assert " ".join(" ".join(text[1:]).split()) == (
        f"≠ worse: {case}: was equivalent, now fault (clip.missing): The experiment clips and "
        "this loop did not: the gradient was beyond the bound at the update. "
        f"= worse: {case}: was equivalent, as expected, now equivalent, not as expected "
        f"– not run any more: {case}: was equivalent, now not-run: tf32 needs a CUDA device "
        f"= better: {case}: was fault (differs.gradient; clip.missing), now equivalent "
        f"= {case}: margin was 0.12, now 0.75 (noise 0.25) "
        f"gone: = {case} "
        f"added, 1 not as expected: ≠ {case}"
    )


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            {"a": RIGHT},
            {"a": RIGHT},
            "1 case in both runs: no verdict changed, no margin moved, none added, none gone.",
        ),
        (
            {"a": RIGHT},
            {"a": FAULT},
            "1 of 1 case changed its verdict (1 worse), 0 margins moved, 0 added, 0 gone.",
        ),
        (
            {"a": RIGHT, "b": RIGHT},
            {"a": RIGHT, "b": RIGHT, "c": RIGHT},
            "0 of 2 cases changed their verdict, 0 margins moved, 1 added, 0 gone.",
        ),
    ],
)
def test_the_first_line_says_what_the_counts_say(
    old: dict[str, Verdict], new: dict[str, Verdict], expected: str
) -> None:
    assert lines(compare(Run(cases(**old)), Run(cases(**new))))[0] == expected


def test_comparing_needs_neither_torch_nor_a_page() -> None:
    code = (
        "import sys; import equivtest.report.comparing; "
        "sys.exit(bool({'torch', 'jinja2', 'pandas'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_nan_is_called_one() -> None:
    text = " ".join(lines(of(with_margin(0.5), with_margin(math.nan)))[1].split())
    assert text == ("= ragged · my_loop · m4-A2-D2 · fp32: margin was 0.50, now NaN (noise 0.25)")


def test_many_changes_fit_a_screen() -> None:
    long = verdicts.fault(PLAN, findings=(replace(SCALE, text="x " * 400, cause=""),))
    names = [f"c{k:03}" for k in range(12)]
    moved = [f"m{k:03}" for k in range(7)]
    old = cases(**dict.fromkeys(names, RIGHT), **dict.fromkeys(moved, with_margin(0.0)))
    new = cases(**dict.fromkeys(names, long), **dict.fromkeys(moved, with_margin(0.75)))
    text = lines(compare(Run(old), Run(new)))
    assert sum(line.startswith("  ≠ worse: ") for line in text) == 10
    assert "  and 2 more changed verdicts" in text
    assert sum(line.startswith("  = ragged") for line in text) == 5
    assert "  and 2 more moved margins" in text
    assert len(text) <= 30
    assert max(map(len, text)) <= 98


def test_of_many_added_cases_the_first_are_named() -> None:
    added = {f"p{k}": verdicts.equivalent(plan) for k, plan in enumerate(plans(32, max_D=1))}
    text = lines(compare(Run(cases(a=RIGHT)), Run(cases(a=RIGHT, **added))))
    assert text[1].startswith("added: = ragged · my_loop · ")
    assert text[1].count("ragged") == 3
    assert text[1].endswith(", …")


def test_an_error_with_another_message_is_another_verdict() -> None:
    boom = verdicts.error(PLAN)
    other = replace(boom, failure=Failure("rank 0 raised ValueError: no"))
    assert boom.status is Status.ERROR
    assert [case.change for case in of(boom, other).changed] == [Change.OTHER]
    assert of(boom, boom).same


def test_a_cost_that_is_noted_now_and_a_finding_without_a_name_are_other_verdicts() -> None:
    right = verdicts.equivalent(PLAN)
    noted = replace(right, notes=("mem.kept_graph: the graph of microbatch 0 is kept",))
    assert [case.change for case in of(right, noted).changed] == [Change.OTHER]
    fault = verdicts.fault(PLAN)
    unnamed = replace(fault, findings=(*fault.findings, Finding("", "something else is off")))
    assert [case.change for case in of(fault, unnamed).changed] == [Change.OTHER]
