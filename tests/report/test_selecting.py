"""Some cases of a run, by words."""

from __future__ import annotations

import pytest
import verdicts

from equivtest.plan import Plan
from equivtest.report.page import render_page
from equivtest.report.run import Run
from equivtest.report.selecting import selected

RUN = Run(
    (
        verdicts.record(verdicts.fault(Plan(4, 2, 2)), "Ragged"),
        verdicts.record(verdicts.equivalent(Plan(4, 2, 2), "fp64"), "digits"),
        verdicts.record(verdicts.equivalent(Plan(2, 4, 2)), "digits"),
    ),
    missing={"t.py::x": "skipped"},
    ended=False,
    unreadable=("a.json is not JSON",),
)


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ("ragged", [0]),
        ("RAGGED FP32", [0]),
        ("fp32 m4-A2-D2", [0]),
        ("m4-A2-D2", [0, 1]),
        ("digits", [1, 2]),
        ("fault", [0]),
        ("equivalent fp64", [1]),
        ("clip.missing", [0]),
        ("test_it[m2", [2]),
        ("  my_loop   digits ", [1, 2]),
    ],
)
def test_every_word_stands_somewhere_in_the_case(words: str, chosen: list[int]) -> None:
    found = selected(RUN, words)
    assert found.records == tuple(RUN.records[k] for k in chosen)
    assert found.selection == f"{len(chosen)} of 3 cases: those with {words!r}"


@pytest.mark.parametrize("words", ["fault digits", "nowhere", "m4-A2-D2 m2-A4-D2"])
def test_words_that_no_case_has_together_are_said(words: str) -> None:
    with pytest.raises(ValueError, match="is found in none of 3 cases: pass words"):
        selected(RUN, words)


def test_what_was_not_collected_is_no_part_of_a_selection_and_what_is_broken_is() -> None:
    found = selected(RUN, "ragged")
    assert found.missing == {}
    assert (found.ended, found.unreadable) == (False, RUN.unreadable)
    html = render_page(found)
    assert "This page shows 1 of 3 cases: those with &#39;ragged&#39;." in html
    assert "left no record" not in html


@pytest.mark.parametrize("words", ["", "   "])
def test_no_words_select_nothing(words: str) -> None:
    with pytest.raises(ValueError, match="has no word: pass some"):
        selected(Run(()), words)
