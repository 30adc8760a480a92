"""How much of each case the page shows: within its budget, the worst first, and told."""

from __future__ import annotations

import re

import pytest
import verdicts
from panel_drawing import Drawings, assert_drawable

from equivtest.compare.verdict import Finding, Verdict
from equivtest.plan import Plan, plans
from equivtest.report.detail import BRIEF_BYTES, FULL_BYTES, Detail, Shown, shown, told
from equivtest.report.grouping import failing_groups
from equivtest.report.page import render_page
from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.views import anchor

PLAN = Plan(4, 2, 2)
FULL, BRIEF, LINE = Detail.FULL, Detail.BRIEF, Detail.LINE
PLANS = plans(16, max_D=4)


def case(number: int, verdict: Verdict, experiment: str = "ragged") -> Record:
    name = f"t.py::case{number}"
    return verdicts.record(verdict, experiment, id=name, nodeid=name)


def failing(number: int, margin: float = 2.0, cause: str = "clip.missing") -> Record:
    rows = (verdicts.tensor("a", 0, margin),)
    return case(number, verdicts.fault(PLAN, rows=rows, findings=(Finding(cause, "seen"),)))


def passing(number: int) -> Record:
    return case(number, verdicts.equivalent(PLAN))


def noted(number: int) -> Record:
    return case(number, verdicts.equivalent(PLAN, notes=("mem.kept_graph: 3 graphs",)))


def sized(full: int, brief: int = 0, line: int = 0, letter: str = "x") -> dict[Detail, str]:
    return {FULL: letter * full, BRIEF: letter * brief, LINE: letter * line}


def details(records: list[Record], sizes: dict[Detail, str]) -> dict[str, Detail]:
    found = shown(records, lambda record, detail: sizes[detail])
    assert {r.id for r in records} == set(found)
    assert all(one.html == sizes[one.detail] for one in found.values())
    return {record_id.rpartition("case")[2]: one.detail for record_id, one in found.items()}


def test_what_is_of_interest_is_in_full_and_the_rest_in_brief() -> None:
    found = details([passing(0), failing(1), noted(2)], sized(9, 1))
    assert found == {"0": BRIEF, "1": FULL, "2": FULL}


def test_a_case_that_could_not_be_run_is_in_brief() -> None:
    assert details([case(0, verdicts.not_run(PLAN))], sized(9, 1)) == {"0": BRIEF}


def falling(count: int) -> list[Record]:
    return [failing(k, margin=9.0 - k) for k in range(count)]


def test_in_full_is_shown_while_there_is_room() -> None:
    found = details(falling(4), sized(FULL_BYTES // 2, 10))
    assert list(found.values()) == [FULL, FULL, BRIEF, BRIEF]
    found = details(falling(4), sized(FULL_BYTES // 2 + 1, 10))
    assert list(found.values()) == [FULL, BRIEF, BRIEF, BRIEF]


def test_beyond_both_budgets_cases_are_lines() -> None:
    found = details(falling(6), sized(1_300_000, 1_000_000, 9))
    assert list(found.values()) == [FULL, BRIEF, BRIEF, LINE, LINE, LINE]
    many = details([passing(k) for k in range(5)], sized(0, BRIEF_BYTES // 2, 9))
    assert list(many.values()) == [BRIEF, BRIEF, LINE, LINE, LINE]


def test_the_worst_case_is_in_full_however_large() -> None:
    found = details(falling(3), sized(BRIEF_BYTES + 1, 10, 9))
    assert list(found.values()) == [FULL, LINE, LINE]


def test_what_did_not_fit_is_not_tried_again() -> None:
    asked = []

    def render(record: Record, detail: Detail) -> str:
        asked.append(detail)
        return sized(FULL_BYTES, 10, 9)[detail]

    shown(falling(5), render)
    assert asked == [FULL, FULL, BRIEF, BRIEF, BRIEF, BRIEF]


def test_a_budget_is_of_bytes() -> None:
    found = details(falling(3), sized(FULL_BYTES // 3, 9, 9, "▲"))  # three bytes each
    assert list(found.values()) == [FULL, BRIEF, BRIEF]
    found = details(falling(3), sized(FULL_BYTES // 6, 9, 9, "\udcff"))  # written as its escape
    assert list(found.values()) == [FULL, BRIEF, BRIEF]


def test_the_worst_of_each_finding_comes_before_the_others_of_any() -> None:
    records = [
        passing(0),
        noted(1),
        failing(2, 9.0),
        failing(3, 8.0),
        failing(4, 2.0, "sync.never"),
        failing(5, 3.0, "sync.never"),
    ]
    found = details(list(reversed(records)), sized(1, 1))
    assert list(found) == ["2", "5", "3", "4", "1", "0"]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ([(failing(0), FULL), (passing(1), BRIEF), (noted(2), FULL)], ""),
        ([], ""),
        ([(failing(0), BRIEF)], "1 case that is not as expected is shown in brief"),
        (
            [(failing(0), BRIEF), (failing(1), BRIEF), (passing(2), BRIEF), (failing(3), FULL)],
            "2 cases that are not as expected are shown in brief",
        ),
        ([(noted(0), BRIEF)], "1 case with a note is shown in brief"),
        (
            [(failing(0), BRIEF), (noted(1), BRIEF), (failing(2), LINE), (passing(3), LINE)],
            "1 case that is not as expected is shown in brief, "
            "1 case with a note is shown in brief, 2 cases are shown as a line",
        ),
    ],
)
def test_what_is_left_out_is_told(found: list[tuple[Record, Detail]], text: str) -> None:
    assert told([Shown(record, detail, "") for record, detail in found]) == text


NAMES = [f"blocks.{k // 8}.part{k % 8}.weight" for k in range(100)]


def test_a_page_of_a_thousand_faults_stays_small() -> None:
    rows = tuple(
        verdicts.tensor(name, u, 5e4 / (1 + k)) for u in (0, 1) for k, name in enumerate(NAMES)
    )
    records = [
        case(k, verdicts.fault(PLANS[k % len(PLANS)], rows=rows), f"e{k // len(PLANS)}")
        for k in range(1000)
    ]
    html = render_page(Run(tuple(records)))
    assert len(html.encode()) <= 5 * 2**20
    assert_drawable(Drawings(html))
    ids = set(re.findall(r' id="(case-\w+)"', html))
    assert ids == {anchor(record) for record in records}
    leading = {anchor(group.worst) for group in failing_groups(records)}
    bodies = re.split(r'<div class="body" id="', html)[1:]
    full = {body[: body.index('"')] for body in bodies if "Distance by depth" in body}
    assert len(leading) == 84
    assert full
    assert full <= leading or leading <= full  # no other before the worst of each
    brief, lines = (
        int(n.replace(",", ""))
        for n in re.search(  # type: ignore[union-attr]
            r"([\d,]+) cases that are not as expected are shown in brief, ([\d,]+) cases are", html
        ).groups()
    )
    assert lines == html.count('<p class="line"')
    assert len(full) + brief + lines == 1000


def test_a_page_of_ten_thousand_cases_leads_to_each() -> None:
    rows = tuple(verdicts.tensor(name) for name in NAMES[:5])
    made = {str(p): verdicts.equivalent(p, rows=rows) for p in PLANS}
    records = [
        case(k, made[str(PLANS[k % len(PLANS)])], f"e{k // len(PLANS)}") for k in range(10_000)
    ]
    html = render_page(Run(tuple(records)))
    wanted = {anchor(record) for record in records}
    assert len(wanted) == 10_000
    assert wanted == set(re.findall(r' id="(case-\w+)"', html))
    cells = re.findall(
        r'<a class="equivalent s\d" data-status="equivalent" href="#(case-\w+)"', html
    )
    assert len(cells) == 10_000
    assert set(cells) == wanted
    assert len(html.encode()) <= 10 * 2**20
