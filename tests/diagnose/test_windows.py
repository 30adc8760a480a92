"""Tails that are dropped or leak, and loops that end after as many microbatches as updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from diagnose.loaders import collating, experiment, finish, held_as, lines, points, windows
from diagnose.test_data_causes import (
    DATA,
    PLANS,
    PRECISIONS,
    case,
    causes,
    check,
    divided_update,
    sampled,
)
from torch.utils.data import DataLoader

from equivtest import Experiment, Plan, Rank
from equivtest.faults.pieces import accumulated, backward, right
from equivtest.faults.windows import tail_dropped, tail_leaks


def short(data: str, plan: Plan, **changes: Any) -> Experiment:
    """Two epochs of a full group and a microbatch a replica."""
    n = plan.examples + 2 * plan.D
    return case(data, n, plan, **{"updates": 4, **changes})


def epochs(rank: Rank, m: int, many: int) -> Iterator[Any]:
    data, sampler = sampled()(rank)
    for _ in range(many):
        yield DataLoader(data, batch_size=m, sampler=sampler, collate_fn=collating(rank))


def drops(m: int, A: int) -> Callable[[Rank], None]:
    """An own loader, and only whole windows of it."""

    def loop(rank: Rank) -> None:
        u = 0
        for loader in epochs(rank, m, 2):
            for batches in windows(loader, A):
                if len(batches) == A:
                    divided_update(rank, [held_as(rank, b) for b in batches], u, "own")
                    u += 1

    return loop


def counts_on(m: int, A: int) -> Callable[[Rank], None]:
    """An own loader whose windows go on from one epoch into the next."""

    def loop(rank: Rank) -> None:
        batches = [batch for loader in epochs(rank, m, 2) for batch in loader]
        for u, window in enumerate(windows(batches, A)):
            divided_update(rank, [held_as(rank, b) for b in window], u, "own")

    return loop


def clears_first(rank: Rank) -> None:
    """What is left of an epoch is run, never applied, and cleared when the next group begins."""
    A = max(map(len, rank.groups))
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for k, batch in enumerate(group):
            last = (k + 1) % A == 0
            with contextlib.nullcontext() if last else rank.model.no_sync():
                backward(rank, right(rank, group, batch))
        if len(group) == A:
            rank.optimizer.step()


def stops(rank: Rank) -> None:
    seen = 0
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        seen += len(group)
        if seen >= len(rank.groups):
            break


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("data", DATA)
class TestNamed:
    def test_the_plans_tail_is_dropped(self, data: str, plan: Plan, precision: str) -> None:
        verdict = check(short(data, plan), plan, tail_dropped, precision)
        assert causes(verdict) == ["window.tail_dropped"]

    def test_the_loaders_tail_is_dropped(self, data: str, plan: Plan, precision: str) -> None:
        verdict = check(short(data, plan), plan, drops(2, plan.A), precision)
        assert causes(verdict) == ["window.tail_dropped"]

    def test_a_tail_that_is_run_and_cleared_is_dropped(
        self, data: str, plan: Plan, precision: str
    ) -> None:
        verdict = check(short(data, plan), plan, clears_first, precision)
        assert causes(verdict) == ["window.tail_dropped"]

    def test_the_plans_tail_leaks(self, data: str, plan: Plan, precision: str) -> None:
        verdict = check(short(data, plan), plan, tail_leaks, precision)
        assert causes(verdict) == ["window.tail_leaks"]

    def test_the_loaders_tail_leaks(self, data: str, plan: Plan, precision: str) -> None:
        verdict = check(short(data, plan), plan, counts_on(2, plan.A), precision)
        assert causes(verdict) == ["window.tail_leaks"]

    def test_microbatches_are_counted_for_updates(
        self, data: str, plan: Plan, precision: str
    ) -> None:
        verdict = check(case(data, 60, plan, updates=5), plan, stops, precision)
        assert causes(verdict) == ["count.micro_vs_update"]


def test_seven_microbatches_of_which_three_make_a_group_give_two_updates() -> None:
    given = experiment(points(14), updates=3, last_group="process")
    verdict = check(given, Plan(2, 3, 1), tail_dropped)
    assert (verdict.card.updates_attempted, verdict.card.microbatches) == (2, 6)
    assert causes(verdict) == ["window.tail_dropped"]
    assert "examples (12, 13)" in verdict.findings[0].text or "(12, 13)" in verdict.findings[0].text


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tail_that_leaks_in_equal_counts_too(precision: str) -> None:
    given = experiment(points(10), updates=4, last_group="process")
    assert causes(check(given, Plan(2, 2, 2), tail_leaks, precision)) == ["window.tail_leaks"]


def test_a_last_group_that_is_meant_to_be_dropped_is_no_fault() -> None:
    given = short("points", Plan(2, 2, 2), last_group="drop", updates=2)
    verdict = check(given, Plan(2, 2, 2), drops(2, 2))
    assert verdict.status == "equivalent", verdict.findings


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_tail_that_is_processed_is_no_fault(precision: str) -> None:
    def processed(rank: Rank) -> None:
        for loader in epochs(rank, 2, 2):
            for u, batches in enumerate(windows(loader, 2)):
                divided_update(rank, [held_as(rank, b) for b in batches], u, "own")

    verdict = check(short("lines", Plan(2, 2, 2)), Plan(2, 2, 2), processed, precision)
    assert verdict.status == "equivalent", verdict.findings


def test_a_loop_that_just_ends_has_a_general_name() -> None:
    def ends(rank: Rank) -> None:
        for group in rank.groups[:1]:
            accumulated(rank, group)
            finish(rank)

    verdict = check(experiment(lines(60), updates=5, last_group="drop"), Plan(2, 3, 2), ends)
    assert causes(verdict) == ["differs.counters"]
