"""Costs are noted on a case that stays equivalent; what costs nothing more is not."""

from __future__ import annotations

import pytest
from diagnose.ragged import PLAN, ragged
from meta.pieces import averaged, backward, finish, right

from equivtest import Plan, Rank, check


def reduced_each_time(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        finish(rank)


def reduced_once_by_hand(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            with rank.model.no_sync():
                backward(rank, right(rank, group, batch))
        averaged(rank)
        finish(rank)


def noted(plan: Plan, loop: object, **more: object) -> tuple[str, ...]:
    verdict = check(ragged(**more), plan, loop=loop)  # type: ignore[arg-type]
    assert verdict.status == "equivalent", verdict.explain()
    return verdict.noted


def test_a_reduction_for_each_microbatch_is_a_cost() -> None:
    verdict = check(ragged(), PLAN, loop=reduced_each_time, expect="sync.extra")
    assert (verdict.status, verdict.passed) == ("equivalent", True)
    note = next(note for note in verdict.notes if note.startswith("sync.extra"))
    assert "reduced 3 times in update 0" in note  # A = 3


@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        (PLAN, None),
        (PLAN, reduced_once_by_hand),
        (Plan(6, 1, 2), reduced_each_time),
        (Plan(4, 3, 1), reduced_each_time),
    ],
)
def test_one_reduction_in_a_group_is_none(plan: Plan, loop: object) -> None:
    assert noted(plan, loop) == ()
