"""Counters, examples and precision against the plan, on traces written by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from equivtest import Plan
from equivtest.arms.case import Case
from equivtest.compare import planned
from equivtest.observe.trace import MicrobatchTrace, State, Trace, UpdateTrace
from equivtest.plan import GroupLayout, layout
from equivtest.precision import precision

# Rank 0 of m2-A2-D2 over eight examples: (0, 1) and (2, 3), in each of two updates.
CASE = Case(
    plan=Plan(2, 2, 2),
    precision=precision("bf16-mixed"),
    groups=layout(Plan(2, 2, 2), 8, updates=2),
    loop=None,
    wrap=None,
    device="cpu",
    digest="",
)


def an_update(ids: Sequence[Any], dtypes: tuple[str, ...] = ("torch.bfloat16",)) -> UpdateTrace:
    return UpdateTrace(
        microbatches=tuple(MicrobatchTrace(i, dtypes=dtypes) for i in ids),
        start=State({}, {}),
        gradient={},
        clipped={},
        before={},
        after={},
        end=State({}, {}),
        averages={},
        optimizers=(),
        applied=True,
    )


RIGHT = an_update([(0, 1), (2, 3)])


def texts(found: Any) -> list[tuple[str, str]]:
    return [(f.cause, f.text) for f in found]


# -- counters


def test_as_many_microbatches_and_updates_as_planned_are_right() -> None:
    assert texts(planned.counters(CASE, Trace(0, (RIGHT, RIGHT)))) == []


def test_another_number_of_updates_is_said_with_both_numbers() -> None:
    assert texts(planned.counters(CASE, Trace(0, (RIGHT,)))) == [
        ("differs.counters", "rank 0 attempted 1 updates: the plan has 2")
    ]


def test_another_number_of_microbatches_is_said_with_both_numbers() -> None:
    short = an_update([(0, 1)])
    assert texts(planned.counters(CASE, Trace(0, (RIGHT, short)))) == [
        ("differs.counters", "update 1 of rank 0 follows 1 microbatches: the plan has 2")
    ]


def test_microbatches_that_were_not_observed_are_noted_and_not_counted() -> None:
    unseen = replace(an_update([]), observed=False)
    trace = Trace(0, (unseen, RIGHT))
    assert texts(planned.counters(CASE, trace)) == []
    (note,) = planned.unobserved(trace)
    assert note.startswith("no forward of update 0 of rank 0 was observed")
    assert list(planned.unobserved(Trace(0, (RIGHT, RIGHT)))) == []


def test_microbatches_that_no_update_uses_are_said() -> None:
    ((cause, text),) = texts(planned.counters(CASE, Trace(0, (RIGHT, RIGHT), left_over=3)))
    assert cause == "differs.counters"
    assert text.startswith("3 microbatches of rank 0 ran after its last update")


def test_the_same_examples_cut_otherwise_are_said_to_be() -> None:
    cut = an_update([(0,), (1,), (2,), (3,)])
    ((_, text),) = texts(planned.counters(CASE, Trace(0, (cut, RIGHT))))
    assert text.startswith("update 0 of rank 0 follows 4 microbatches: the plan has 2, of the same")
    others = an_update([(0,), (1,), (2,), (2,)])
    ((_, text),) = texts(planned.counters(CASE, Trace(0, (others, RIGHT))))
    assert text.endswith("the plan has 2")


# -- examples


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        ([(0, 1), (2, 3)], ""),
        ([(2, 3), (0, 1)], ""),  # the order of microbatches is the loop's business
        ([(1, 0), (3, 2)], ""),
        ([None, (2, 3)], ""),  # unknown is not wrong
        ([None, None], ""),
        ([(0, 1), (4, 5)], "examples 4, 5 are not dealt to it (4 is dealt to rank 1 in update 0)"),
        ([(0, 1), (0, 1)], "examples 0, 1 came twice"),
        ([None, (7, 3)], "examples 7 are not dealt to it (7 is dealt to rank 1 in update 0)"),
        ([(0,), (2, 3)], "examples 1 never came"),
    ],
)
def test_the_examples_received_are_those_dealt(ids: Sequence[Any], problem: str) -> None:
    found = texts(planned.examples(CASE, Trace(0, (an_update(ids),))))
    assert found == ([("differs.examples", f"in update 0 of rank 0, {problem}")] if problem else [])


def test_each_rank_has_examples_of_its_own() -> None:
    ((cause, text),) = texts(planned.examples(CASE, Trace(1, (RIGHT,))))
    assert (cause, text) == (
        "differs.examples",
        "in update 0 of rank 1, examples 0, 1, 2, 3 are not dealt to it (0 is dealt to rank 0 in "
        "update 0)",
    )


# -- precision

LOW = frozenset({"torch.bfloat16", "torch.float32"})


def applied(dtypes: tuple[str, ...], seen_in_replay: frozenset[str] = LOW) -> list[str]:
    trace = Trace(0, (an_update([(0, 1)], dtypes),))
    return [f.cause for f in planned.precision_applied(CASE, trace, seen_in_replay)]


def test_a_forward_that_never_saw_the_low_dtype_did_not_run_under_autocast() -> None:
    assert applied(("torch.float32",)) == ["prec.not_applied"]


def test_a_forward_that_saw_the_low_dtype_ran_under_autocast() -> None:
    assert applied(("torch.bfloat16", "torch.float32")) == []


def test_dtypes_that_were_not_seen_say_nothing() -> None:
    assert applied(()) == []


def test_each_forward_that_was_seen_ran_under_autocast() -> None:
    right = MicrobatchTrace((0, 1), dtypes=("torch.bfloat16",))
    bare = MicrobatchTrace((2, 3), dtypes=("torch.float32",))
    mixed = replace(an_update([]), microbatches=(right, bare))
    ((cause, text),) = texts(planned.precision_applied(CASE, Trace(0, (RIGHT, mixed)), LOW))
    assert cause == "prec.not_applied"
    assert text.startswith("1 of 2 forwards of update 1 of rank 0 saved torch.float32")


@pytest.mark.parametrize(("empty", "said"), [(1, 0), (0, 1)])
def test_a_forward_of_no_example_may_run_without_autocast(empty: int, said: int) -> None:
    case = replace(CASE, groups=(GroupLayout(0, 0, (((0, 1), *[()] * empty),)),))
    right = MicrobatchTrace((0, 1), dtypes=("torch.bfloat16",))
    unknown = MicrobatchTrace(None, dtypes=("torch.float32",))
    mixed = replace(an_update([]), microbatches=(right, unknown))
    assert len(list(planned.precision_applied(case, Trace(0, (mixed,)), LOW))) == said


def test_a_model_that_autocast_leaves_alone_cannot_tell() -> None:
    assert applied(("torch.float32",), frozenset({"torch.float32"})) == []


# -- schedule


@pytest.mark.parametrize(
    ("unit", "calls"),
    # Updates applied, skipped, applied, before each of which two microbatches run.
    [("applied", [0, 1, 1]), ("attempted", [0, 1, 2]), ("microbatch", [2, 4, 6])],
)
def test_a_scheduler_has_had_as_many_calls_as_its_unit_passed(unit: str, calls: list[int]) -> None:
    groups = layout(Plan(2, 2, 2), 8, updates=3)
    skipped = UpdateTrace(**{**vars(RIGHT), "applied": False})
    trace = Trace(0, (RIGHT, skipped, RIGHT))
    assert [planned.scheduler_calls(unit, trace, groups, u) for u in range(3)] == calls
