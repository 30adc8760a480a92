"""A case as text for an issue or a commit message."""

from __future__ import annotations

import pytest
import verdicts

from equivtest.compare.verdict import Finding
from equivtest.plan import Plan
from equivtest.report.pasted import pasted

PLAN = Plan(4, 2, 2)


def test_who_it_is_the_verdict_where_it_ran_and_how_to_run_it_again() -> None:
    record = verdicts.record(verdicts.fault(PLAN))
    text = pasted(record)
    lines = text.splitlines()
    assert lines[:4] == [
        "```text",
        "ragged · my_loop · m4-A2-D2 · fp32",
        "",
        record.verdict.explain().splitlines()[0],
    ]
    assert record.verdict.explain() in text
    assert lines[-4:] == [
        "",
        "torch 2.13.0, device CPU, python 3.11.9",
        f"Rerun: {record.rerun}",
        "```",
    ]


@pytest.mark.parametrize(
    ("said", "fence"),
    [
        ("plain", "```"),
        ("``", "```"),
        ("` `` `", "```"),
        ("```", "````"),
        ("a ````` b", "``````"),
        ("``` and ````", "`````"),
    ],
)
def test_the_fence_is_longer_than_any_in_the_text(said: str, fence: str) -> None:
    verdict = verdicts.fault(PLAN, findings=(Finding("", said),))
    lines = pasted(verdicts.record(verdict)).splitlines()
    assert (lines[0], lines[-1]) == (f"{fence}text", fence)


def test_a_case_of_which_little_is_known_is_text_too() -> None:
    text = pasted(verdicts.record(verdicts.not_run(PLAN), environment={}))
    assert "not-run: m4-A2-D2 in tf32: tf32 needs a CUDA device" in text
