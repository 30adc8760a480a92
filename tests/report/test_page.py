"""The page: true to its records, safe against what they hold, and alone on its disk."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import verdicts
from verdicts import HOSTILE

from equivtest.compare.verdict import Finding, Verdict
from equivtest.plan import Plan, plans
from equivtest.report.detail import Detail
from equivtest.report.matrix import cell, matrices, shade
from equivtest.report.page import render_page, write_page
from equivtest.report.run import Run
from equivtest.report.views import anchor, case_view

PLAN = Plan(4, 2, 2)


def page(*verdicts_: Verdict, **run: Any) -> str:
    return render_page(Run(tuple(map(verdicts.record, verdicts_)), **run))


class Reader(HTMLParser):
    """Text of the page, its tags, and the ids and fragments that must meet."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""
        for name, value in attrs:
            assert not name.startswith("on"), f"{name} on {tag}"
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "data", "poster", "srcset"):
                self.addresses.append(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_hostile_text_in_every_field_is_shown_as_text(tmp_path: Path) -> None:
    run = Run(
        (verdicts.everywhere_hostile(),),
        {HOSTILE: HOSTILE},
        False,
        (HOSTILE,),
        unreadable=(HOSTILE,),
    )
    write_page(run, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(html)
    assert reader.tags.count("script") == 1  # the page's own
    assert "img" not in reader.tags
    assert "49" not in re.findall(r"\{\{ 7\*7 \}\}|49", reader.text)
    # id, name, rerun, environment, card, findings, events, error, ranks, notes, missing ...
    assert reader.text.count("<script>window.owned = 1</script>") >= 25


def test_the_page_asks_for_nothing() -> None:
    html = page(verdicts.fault(PLAN), verdicts.error(PLAN), verdicts.equivalent(PLAN, "bf16"))
    reader = Reader(html)
    assert all(address.startswith("#") or address == "data:," for address in reader.addresses)
    assert "default-src 'none'" in reader.policy
    assert "unsafe" not in reader.policy
    assert not re.search(r"url\((?!#hatch\))|@import|https?:|\sstyle=", html)


def test_style_and_script_are_those_that_the_policy_names() -> None:
    html = page(verdicts.fault(PLAN))
    (style,) = re.findall(r"<style>(.*?)</style>", html, re.S)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    for text in (style, script):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in Reader(html).policy


def test_style_and_script_may_stand_in_files_beside_the_page(tmp_path: Path) -> None:
    run = Run((verdicts.record(verdicts.fault(PLAN)),))
    write_page(run, tmp_path / "page.html", external=True)
    reader = Reader((tmp_path / "page.html").read_text())
    assert {"equivtest.css", "equivtest.js"} < set(reader.addresses)
    assert {"equivtest.css", "equivtest.js", "page.html"} == {p.name for p in tmp_path.iterdir()}
    assert "script-src 'self'" in reader.policy
    assert "style" not in reader.tags


def test_every_link_leads_somewhere_and_every_case_has_one() -> None:
    made = [
        verdicts.record(verdict)
        for verdict in (
            verdicts.fault(PLAN),
            verdicts.error(PLAN, "fp64"),
            verdicts.not_run(PLAN),
            verdicts.equivalent(PLAN, "bf16"),
        )
    ]
    reader = Reader(render_page(Run(tuple(made))))
    assert len(set(reader.ids)) == len(reader.ids)
    fragments = {address[1:] for address in reader.addresses if address.startswith("#")}
    assert fragments <= set(reader.ids)
    assert {anchor(record) for record in made} <= fragments


def test_failing_cases_come_first_and_open_the_worst_before_the_others() -> None:
    html = page(
        verdicts.equivalent(Plan(8, 1, 2)),
        verdicts.fault(Plan(4, 2, 2), margin=20.0),
        verdicts.fault(
            Plan(2, 4, 2), "fp64", margin=5e12, findings=(Finding("differs.ranks", "x"),)
        ),
        verdicts.fault(Plan(1, 8, 2), margin=1e5),
    )
    opened = re.findall(
        r'<details class="case" data-status="(\w+)"( open)?>.*?class="name">(.*?)<', html, re.S
    )
    assert [(status, bool(is_open)) for status, is_open, _ in opened] == [
        ("fault", True),
        ("fault", True),
        ("fault", True),
        ("equivalent", False),
    ]
    assert "m1-A8-D2" in opened[0][2] or "m2-A4-D2" in opened[0][2]
    assert "m4-A2-D2" in opened[2][2]


def test_a_failing_case_shows_all_tensors_a_passing_one_five_and_says_so() -> None:
    rows = tuple(verdicts.tensor(f"layer{k}.weight", 0, 0.01 * k) for k in range(12))
    passing = case_view(verdicts.record(verdicts.equivalent(PLAN, rows=rows)), Detail.BRIEF)
    assert [row.tensor for row in passing.tensors] == [f"layer{k}.weight" for k in range(11, 6, -1)]
    assert "7 rows with smaller margins left out here" in page(verdicts.equivalent(PLAN, rows=rows))
    failing = case_view(verdicts.record(verdicts.fault(PLAN, rows=rows)))
    assert len(failing.tensors) == 12
    assert failing.tensors_left_out == 0


def test_parameters_are_shown_where_they_were_compared() -> None:
    assert "parameters: is the update right?" in page(verdicts.equivalent(PLAN))
    rows = (verdicts.tensor("w", parameter_distance=None, parameter_tolerance=None),)
    assert "parameters: is the update right?" not in page(verdicts.equivalent(PLAN, rows=rows))


def test_a_tensor_that_is_nan_is_the_worst_and_beyond() -> None:
    view = case_view(verdicts.record(verdicts.nothing_finite(PLAN)))
    assert view.tensors[0].bar == (100.0, True)
    assert "1 of 1 rows beyond tolerance" in view.tensors_of


def test_columns_by_d_then_a_and_rows_by_precision() -> None:
    made = [
        verdicts.record(verdicts.equivalent(plan, precision))
        for precision in ("bf16-mixed", "fp64", "fp32")
        for plan in reversed(plans(8, max_D=2))
    ]
    (matrix,) = matrices(made)
    assert [column.plan for column in matrix.columns] == [
        "m8-A1-D1",
        "m4-A2-D1",
        "m2-A4-D1",
        "m1-A8-D1",
        "m4-A1-D2",
        "m2-A2-D2",
        "m1-A4-D2",
    ]
    assert matrix.replicas == [(1, 4), (2, 3)]
    assert [row.precision for row in matrix.blocks[0].rows] == ["fp64", "fp32", "bf16-mixed"]


def test_matrices_and_experiments_with_a_failure_come_first() -> None:
    made = [
        verdicts.record(verdicts.equivalent(Plan(1, 2, 2)), "a"),
        verdicts.record(verdicts.equivalent(Plan(4, 2, 2)), "b"),
        verdicts.record(verdicts.fault(Plan(4, 2, 2)), "c"),
    ]
    found = matrices(made)
    assert [matrix.examples for matrix in found] == [16, 4]
    assert [block.experiment for block in found[0].blocks] == ["c", "b"]


@pytest.mark.parametrize(
    ("margin", "expected"),
    [(0.0, 0), (0.5, 0), (0.51, 1), (5.0, 1), (11.0, 2), (1001.0, 3), (2e6, 4), (float("inf"), 4)],
)
def test_shade_follows_decades(margin: float, expected: int) -> None:
    assert shade(margin) == expected


def test_a_cell_marks_what_a_test_expected() -> None:
    expected = verdicts.fault(PLAN, expect=("clip.missing", "differs.gradient"))
    assert cell(verdicts.record(expected)).mark == "✓"
    absent = verdicts.equivalent(PLAN, expect=("clip.missing",))
    assert cell(verdicts.record(absent)).mark == "✗"
    assert "not as expected" in cell(verdicts.record(absent)).title
    assert cell(verdicts.record(verdicts.fault(PLAN))).mark == ""


def test_what_is_missing_is_said() -> None:
    html = page(
        verdicts.equivalent(PLAN),
        missing={"t.py::a": "unfinished", "t.py::b": "skipped"},
        ended=False,
        unreadable=("x.json is not JSON",),
    )
    assert "2 collected tests left no record (1 skipped, 1 never finished)" in html
    assert "t.py::a" in html
    assert "did not end by itself" in html
    assert "x.json is not JSON" in html


def test_a_run_without_records_is_a_page_too() -> None:
    assert "No case left a record." in page()


def test_no_axis_is_called_step() -> None:
    html = page(verdicts.fault(PLAN), verdicts.equivalent(PLAN, "fp64"))
    text = Reader(html).text.replace("rank.optimizer.step()", "")  # torch's own word
    assert not re.search(r"\bsteps?\b", text, re.IGNORECASE)


def test_the_page_is_the_same_whatever_order_the_records_are_read_in() -> None:
    made = [
        verdicts.record(make(plan, precision))
        for make in (verdicts.fault, verdicts.equivalent)
        for plan in plans(8, max_D=2)
        for precision in ("fp32", "fp64")
    ]
    made = [replace(r, id=f"{r.id}{k}", nodeid=f"{r.nodeid}{k}") for k, r in enumerate(made)]
    assert render_page(Run(tuple(made))) == render_page(Run(tuple(reversed(made))))


def test_a_comparison_with_sums_made_exact_is_said_to_be_one() -> None:
    row = verdicts.tensor("a", state="rounding", replay_distance=1e-3, exact_distance=2.5e-8)
    html = page(verdicts.equivalent(PLAN, rows=(row,)))
    assert "did the loop do the plan? (sums exact)" in html
    assert "<td>2.5e-8</td><td>2.5e-7</td><td>0.10</td>" in html
    assert "(sums exact)" not in page(verdicts.equivalent(PLAN))


def test_the_sensitivity_of_a_case_stands_on_the_page_where_it_was_asked_for() -> None:
    asked = Reader(page(verdicts.equivalent(PLAN, sensitivity=verdicts.sensitivity())))
    assert "2 of 4 kinds would be caught here" in asked.text
    assert "runs, and is not seen: mem.kept_graph" in asked.text
    assert "Sensitivity" not in Reader(page(verdicts.equivalent(PLAN))).text
