"""``comparison.html``: what changed, in as much detail as there is room for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verdicts

from equivtest.plan import plans
from equivtest.report import detail
from equivtest.report.comparing import compare
from equivtest.report.comparisonpage import render_comparison
from equivtest.report.run import Run

PLANS = plans(16, max_D=2)


def page() -> str:
    """All nine cases are worse now."""
    old = [verdicts.record(verdicts.equivalent(plan)) for plan in PLANS]
    new = [verdicts.record(verdicts.fault(plan)) for plan in PLANS]
    new = [replace(record, environment={"torch": "2.14.0"}) for record in new]
    return render_comparison(compare(Run(tuple(old)), Run(tuple(new))))


def test_changed_cases_are_there_as_they_are_now() -> None:
    html = page()
    assert "9 of 9 cases changed their verdict (9 worse)" in html
    assert html.count('<details class="case"') == 9
    assert html.count("Distance by depth: ") == 9
    assert "torch: was 2.13.0, now 2.14.0" in html
    assert "shown as a line" not in html


def test_where_there_is_no_room_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(detail._BUDGETS, detail.Detail.FULL, 1)
    monkeypatch.setitem(detail._BUDGETS, detail.Detail.BRIEF, 1)
    html = page()
    assert html.count('<details class="case"') == 1  # the first is shown whatever it weighs
    assert html.count('<p class="line"') == 8
    assert "8 cases are shown as a line" in html
