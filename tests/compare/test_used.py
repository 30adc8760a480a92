"""Examples beside the plan's over replicas and epochs, on traces written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from compare.test_planned import an_update

from equivtest import Plan
from equivtest.arms.case import Case
from equivtest.compare import used
from equivtest.observe.trace import Trace
from equivtest.plan import layout
from equivtest.precision import precision

# m1-A2-D2 over eight examples: 0, 1 | 2, 3 and 4, 5 | 6, 7, one epoch.
CASE = Case(
    plan=Plan(1, 2, 2),
    precision=precision("fp32"),
    groups=layout(Plan(1, 2, 2), 8, updates=2),
    loop=None,
    wrap=None,
    device="cpu",
    digest="",
)

Ids = Sequence[Sequence[int | None]]
"""By update, then one microbatch after the other."""


def traces(*ranks: Ids, own: bool = True, twins: tuple[tuple[int, ...], ...] = ()) -> list[Trace]:
    made = []
    for rank, updates in enumerate(ranks):
        seen = [an_update([None if i is None else (i,) for i in ids]) for ids in updates]
        told = [
            replace(one, microbatches=tuple(replace(m, by_contents=own) for m in one.microbatches))
            for one in seen
        ]
        made.append(Trace(rank, tuple(told), twins=twins))
    return made


def problems(*ranks: Ids, own: bool = True) -> list[str]:
    return [finding.text for finding in used.examples(CASE, traces(*ranks, own=own))]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([[0, 1], [4, 5]], [[2, 3], [6, 7]]),  # as the plan deals them
        ([[0, 2], [4, 6]], [[1, 3], [5, 7]]),  # over replicas in turn
        ([[7, 2], [4, 0]], [[6, 3], [5, 1]]),  # in an order of its own
        ([[0, None], [4, 5]], [[2, 3], [6, 7]]),  # unknown is not wrong
    ],
)
def test_an_epoch_of_all_examples_is_right(first: Ids, second: Ids) -> None:
    assert problems(first, second) == []


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ([[0, 1], [4, 5]], [[0, 1], [4, 5]], "examples 0, 1, 4, 5 came twice, and examples 2, 3"),
        ([[0, 1], [4, 5]], [[2, 3], [6, 6]], "examples 6 came twice, and examples 7 never came"),
        ([[0, None], [4, 4]], [[2, 3], [6, 7]], "examples 4 came twice"),
    ],
)
def test_examples_that_come_twice_or_never_are_said(first: Ids, second: Ids, problem: str) -> None:
    (text,) = problems(first, second)
    assert text.startswith("in updates 0 to 1 (epoch 0), " + problem)


def test_batches_that_the_loop_was_handed_are_each_replicas_own() -> None:
    assert problems([[0, 1], [4, 5]], [[2, 3], [6, 7]], own=False) == []
    swapped = problems([[2, 3], [4, 5]], [[0, 1], [6, 7]], own=False)
    assert swapped[0] == (
        "in update 0 of rank 0, examples 2, 3 are not dealt to it (2 is dealt to rank 1 in update "
        "0)"
    )


def groups(*ranks: Ids, own: bool = True) -> list[tuple[tuple[int, ...], ...]]:
    """Ids by update and replica, as updates are judged."""
    judged = used.used_groups(CASE, traces(*ranks, own=own))
    return [tuple(tuple(i for ids in r for i in ids) for r in group.ids) for group in judged]


def test_updates_are_judged_on_what_an_own_loader_gave() -> None:
    assert groups([[0, 2], [4, 6]], [[1, 3], [5, 7]]) == [((0, 2), (1, 3)), ((4, 6), (5, 7))]


def test_updates_are_judged_by_the_plan_where_something_is_unknown() -> None:
    found = groups([[0, None], [4, 6]], [[1, 3], [5, 7]])
    assert found == [((0, 1), (2, 3)), ((4, 6), (5, 7))]


def test_a_handed_batch_used_twice_is_judged_by_the_plan_and_another_groups_as_used() -> None:
    assert groups([[0, 0]], [[2, 3]], own=False)[0] == ((0, 1), (2, 3))
    assert groups([[4, 5]], [[6, 7]], own=False)[0] == ((4, 5), (6, 7))


def told(*ranks: Ids, twins: tuple[tuple[int, ...], ...]) -> list[list[int]]:
    found = used.told_apart(CASE, traces(*ranks, twins=twins))
    return [[i for u in t.updates for m in u.microbatches for i in m.ids or ()] for t in found]


def test_equal_examples_are_told_apart_so_that_each_comes_as_often() -> None:
    """0 stands for 5 and 7 as well; ranks saw different ones of them."""
    classes = ((0, 5), (0, 7))
    found = told([[0, 1], [4, 0]], [[2, 3], [6, 0]], twins=classes)
    assert found == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_what_comes_more_often_than_there_are_equal_examples_comes_twice() -> None:
    found = told([[0, 0], [0, 0]], [[2, 3], [6, 4]], twins=((0, 5),))
    assert sorted(found[0]) == [0, 0, 5, 5]
