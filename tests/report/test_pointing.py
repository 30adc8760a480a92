"""The loop's own source: which lines a cause speaks of."""

from __future__ import annotations

from dataclasses import replace

import pytest
import verdicts
from panel_drawing import drawing_of

from equivtest.causes import Cause, Kind
from equivtest.compare.tables import EventRow
from equivtest.compare.verdict import Finding, Verdict
from equivtest.plan import Plan
from equivtest.report.listing import Listing
from equivtest.report.pointing import CONCERNED, Source, concerned, pointed, sources

PLAN = Plan(4, 2, 2)
ALL = (
    "forward",
    "backward",
    "collective",
    "unscale",
    "scaler update",
    "clip",
    "update attempted",
    "update skipped",
    "update applied",
    "scheduler",
    "zero_grad",
    "average",
)


def caused(*causes: str, events: tuple[EventRow, ...] | None = None) -> Verdict:
    verdict = verdicts.fault(PLAN, findings=tuple(Finding(cause, "seen") for cause in causes))
    if events is None:
        return verdict
    return verdicts.fault(PLAN, findings=verdict.findings, events=events)


def hot(verdict: Verdict, *listings: Listing) -> list[int]:
    found = sources(listings or (verdicts.LISTING,), verdict)
    return [line.number for one in found for line in one.lines if line.hot]


@pytest.mark.parametrize(
    ("cause", "kinds"),
    [
        ("norm.miscounted", {"forward", "backward"}),
        ("norm.double_accum_division", {"backward"}),
        ("accum.only_last", {"zero_grad"}),
        ("accum.leak_between_optimizers", {"zero_grad", "backward"}),
        ("clip.before_unscale", {"clip", "unscale"}),
        ("sched.never", {"scheduler"}),
        ("count.wrong_dp_size", {"scheduler"}),
        ("prec.not_applied", {"forward"}),
        ("prec.low_precision_reduce", {"backward", "collective"}),
        ("state.ema_per_microbatch", {"average"}),
        ("state.ema_never", {"update attempted"}),
        ("differs.gradient", {"backward"}),
        ("differs.state", {"update attempted", "scheduler"}),
        # no lines: a source is no mistake of the loop, a log is none of these, no such cause
        ("source.dropout", set()),
        ("log.loss_factor", set()),
        ("", set()),
        ("norms.miscounted", set()),
    ],
)
def test_a_cause_speaks_of_its_kinds_of_events(cause: str, kinds: set[str]) -> None:
    assert concerned([cause], ALL) == kinds


def test_where_the_loop_lacks_what_the_cause_speaks_of_the_update_stands_for_it() -> None:
    assert concerned(["clip.missing"], ("forward", "backward", "update attempted")) == {
        "update attempted"
    }
    assert concerned(["clip.missing"], ("forward", "backward")) == {"backward"}
    assert concerned(["clip.missing"], ("forward",)) == set()
    assert concerned(["clip.missing", "norm.miscounted"], ("backward", "clip")) == {
        "backward",
        "clip",
    }


def test_every_cause_of_a_loop_speaks_of_something_and_every_key_is_a_cause() -> None:
    families = {str(cause).partition(".")[0] for cause in Cause}
    assert set(CONCERNED) <= families | set(map(str, Cause))
    for cause in Cause:
        if cause.kind not in (Kind.SOURCE,) and not str(cause).startswith("log."):
            assert concerned([str(cause)], ALL), cause


def test_lines_carry_the_signs_of_what_happened_there() -> None:
    (made,) = sources((verdicts.LISTING,), caused("clip.missing"))
    assert [(line.number, line.signs, line.hot) for line in made.lines] == [
        (11, "", False),
        (12, "", False),
        (13, "", False),
        (14, "F", False),
        (15, "BR", False),
        (16, "C", True),
        (17, "◇", False),
    ]
    assert made.where == "cases/test_loop.py:16"


def test_without_a_cause_no_line_is_marked() -> None:
    (made,) = sources((verdicts.LISTING,), verdicts.equivalent(PLAN))
    assert not any(line.hot for line in made.lines)
    assert made.where == "cases/test_loop.py:11"
    assert hot(caused("clip.missing")) == [16]
    assert hot(caused("source.dropout")) == []


def test_a_noted_cost_marks_its_lines() -> None:
    noted = verdicts.equivalent(PLAN, notes=("mem.kept_graph: 3 graphs",))
    assert noted.noted == ("mem.kept_graph",)
    assert hot(noted) == [14, 15]


def test_functions_that_a_cause_speaks_of_stand_alone() -> None:
    other = Listing("cases/test_loop.py", 1, ("def helper():", "    pass"))
    found: tuple[Source, ...] = sources((other, verdicts.LISTING), caused("clip.missing"))
    assert [one.lines[0].number for one in found] == [11]
    found = sources((other, verdicts.LISTING), caused("source.dropout"))
    assert [one.lines[0].number for one in found] == [1, 11]


def test_lines_that_say_what_a_cause_is_about_are_pointed_at_where_no_event_tells() -> None:
    text = ("def loop(rank):", "    with rank.model.no_sync():", "        loss.backward()")
    listing = Listing("cases/test_loop.py", 14, text)
    (found,) = sources((listing,), caused("sync.never"))
    assert [line.number for line in found.hot] == [15]
    (found,) = sources((replace(listing, lines=text[:1] + text[2:]),), caused("sync.never"))
    assert [line.number for line in found.hot] == [15]  # the backward, by its event


def test_the_first_cause_alone_is_pointed_at_on_the_first_screen() -> None:
    both = caused("clip.missing", "accum.only_last")
    pointing = pointed((verdicts.LISTING,), both)
    assert pointing is not None
    assert [line.number for line in pointing.hot] == [16]
    assert pointing.where == "cases/test_loop.py:16"
    assert pointed((verdicts.LISTING,), caused("source.dropout")) is None


def test_of_a_record_without_lines_or_listings_nothing_is_marked() -> None:
    untold = (EventRow(0, 0, 0, "clip"),)
    assert hot(caused("clip.missing", events=untold)) == []
    assert sources((), caused("clip.missing")) == ()
    assert sources((Listing("a.py", 1, ()),), caused("clip.missing")) == ()


def test_a_kind_that_is_not_known_has_no_sign() -> None:
    rows = (EventRow(0, 0, None, "something new", lines=(11,)),)
    (made,) = sources((verdicts.LISTING,), caused("clip.missing", events=rows))
    assert {line.signs for line in made.lines} == {""}


def test_the_page_shows_it() -> None:
    html = drawing_of(caused("clip.missing")).html
    assert "<code>cases/test_loop.py:16</code>" in html
    assert "▶  16 C" in html


def test_words_in_comments_and_texts_point_at_nothing() -> None:
    text = ("def loop(rank):", '    """Uses no_sync rightly."""  # no_sync', "    loss.backward()")
    (found,) = sources((Listing("a.py", 13, text),), caused("sync.never"))
    assert [line.number for line in found.hot] == [15]


def through(*lines: int, kind: str = "backward") -> EventRow:
    return EventRow(0, 0, 0, kind, lines=lines)


LOOP = Listing("a.py", 10, ("def loop(rank):", "    total(rank).backward()", "    step()"))
LOSS = Listing("a.py", 20, ("def total(rank):", "    return rank.model()"))
WRAPPER = Listing("a.py", 1, ("def entry(rank):", "    return loop(rank)"))


def test_a_wrapper_that_only_calls_the_loop_is_not_pointed_at() -> None:
    rows = (through(11, 2), through(12, 2, kind="update attempted"))
    verdict = caused("norm.missing_world_size", events=rows)
    (found,) = sources((WRAPPER, LOOP), verdict)
    assert [line.number for line in found.hot] == [11]


def test_of_a_forward_it_is_the_line_of_the_loop_and_not_that_of_the_loss() -> None:
    rows = (
        through(21, 11, kind="forward"),
        through(11),
        through(12, kind="update attempted"),
    )
    (found,) = sources((LOOP, LOSS), caused("differs.examples", events=rows))
    assert [line.number for line in found.hot] == [11]
