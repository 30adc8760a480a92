"""Loaders that deal wrongly are named by the order in which forwards received the examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diagnose.loaders import (
    accumulate,
    collating,
    experiment,
    finish,
    held_as,
    lines,
    points,
    windows,
    with_sampler,
)
from torch.utils.data import DataLoader, DistributedSampler, Subset

import equivtest
from equivtest import Experiment, Plan, Rank
from equivtest.compare.verdict import Verdict

PLANS = [Plan(2, 2, 2), Plan(2, 3, 2)]  # A = D, and m = D < A
PRECISIONS = ["fp64", "fp32"]
DATA = {"points": points, "lines": lines}


def dealing(
    deal: Callable[[Rank], tuple[Any, Any]], m: int, A: int, updates: int, by: str = "own"
) -> Callable[[Rank], None]:
    """A loop over what ``deal`` gives, divided by the count of its own or the plan's examples."""

    def loop(rank: Rank) -> None:
        data, sampler = deal(rank)
        loader: Any = DataLoader(data, batch_size=m, sampler=sampler, collate_fn=collating(rank))
        done, epoch = 0, 0
        while done < updates:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
            for batches in list(windows(loader, A))[: updates - done]:
                divided_update(rank, [held_as(rank, b) for b in batches], done, by)
                done += 1
            epoch += 1

    return loop


def divided_update(rank: Rank, batches: list[Any], u: int, by: str) -> None:
    if by == "plan":
        count = rank.groups[u].count
    else:
        with torch.no_grad():
            own = sum(float(rank.loss(rank.module, batch).count) for batch in batches)
        total = torch.tensor(own, dtype=torch.float64)
        torch.distributed.all_reduce(total, group=rank.dp_group)
        count = float(total) * (2 if by == "twice" else 1)
    accumulate(rank, batches, count)
    finish(rank)


def sampled(shuffle: bool = False) -> Callable[[Rank], tuple[Any, Any]]:
    return lambda rank: (
        rank.dataset,
        DistributedSampler(rank.dataset, rank.D, rank.dp_rank, shuffle=shuffle),  # type: ignore
    )


def sampled_twice(shuffle: bool = False) -> Callable[[Rank], tuple[Any, Any]]:
    def deal(rank: Rank) -> tuple[Any, Any]:
        own: Any = Subset(rank.dataset, range(rank.dp_rank, len(rank.dataset), rank.D))  # type: ignore
        return own, DistributedSampler(own, rank.D, rank.dp_rank, shuffle=shuffle)

    return deal


def in_blocks_and_sampled(rank: Rank) -> tuple[Any, Any]:
    size = len(rank.dataset) // rank.D
    own: Any = Subset(rank.dataset, range(rank.dp_rank * size, (rank.dp_rank + 1) * size))  # type: ignore
    return own, DistributedSampler(own, rank.D, rank.dp_rank, shuffle=False)


def undealt(rank: Rank) -> tuple[Any, Any]:
    return rank.dataset, None


def undealt_in_own_order(rank: Rank) -> tuple[Any, Any]:
    order = torch.randperm(len(rank.dataset), generator=torch.Generator().manual_seed(rank.dp_rank))
    return rank.dataset, order.tolist()


def check(given: Experiment, plan: Plan, loop: Any, precision: str = "fp64", **how: Any) -> Verdict:
    return equivtest.check(given, plan, precision=precision, loop=loop, **how)


def causes(verdict: Verdict) -> list[str]:
    assert verdict.failure is None, verdict.failure
    return [str(cause) for cause in verdict.causes]


def case(data: str, n: int, plan: Plan, **changes: Any) -> Experiment:
    return experiment(DATA[data](n), **{"updates": 3, "last_group": "process", **changes})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("data", DATA)
class TestNamed:
    def test_every_replica_reads_the_same(self, data: str, plan: Plan, precision: str) -> None:
        loop = dealing(undealt, 2, plan.A, 3)
        assert causes(check(case(data, 36, plan), plan, loop, precision)) == ["data.not_sharded"]

    def test_every_replica_reads_all_in_its_own_order(
        self, data: str, plan: Plan, precision: str
    ) -> None:
        given = case(data, 18, plan, updates=2)
        loop = dealing(undealt_in_own_order, 2, plan.A, 4)
        assert causes(check(given, plan, loop, precision))[0] == "data.not_sharded"

    @pytest.mark.parametrize("deal", [sampled_twice(), in_blocks_and_sampled])
    def test_dealt_twice(self, data: str, plan: Plan, precision: str, deal: Any) -> None:
        loop = dealing(deal, 2, plan.A, 3)
        found = causes(check(case(data, 36, plan), plan, loop, precision))
        assert found == ["data.double_sharding"]

    def test_dealt_twice_and_shuffled(self, data: str, plan: Plan, precision: str) -> None:
        given = case(data, 36, plan, updates=6, shuffle=True)
        loop = dealing(sampled_twice(shuffle=True), 2, plan.A, 6)
        assert causes(check(given, plan, loop, precision)) == ["data.double_sharding"]

    def test_padded_with_what_came_before(self, data: str, plan: Plan, precision: str) -> None:
        n = 2 * plan.examples - 1
        verdict = check(
            case(data, n, plan, updates=2), plan, dealing(sampled(), 2, plan.A, 2), precision
        )
        assert causes(verdict) == ["data.padding_duplicates"]
        assert "examples 0 came again in update 1" in verdict.findings[0].text

    def test_the_second_epoch_in_the_order_of_the_first(
        self, data: str, plan: Plan, precision: str
    ) -> None:
        given = case(data, plan.examples, plan, updates=2, shuffle=True)
        loop = with_sampler(2, plan.A, epochs=2, shuffle=True, set_epoch=False)
        assert causes(check(given, plan, loop, precision)) == ["data.epoch_not_set"]


# -- the numbers of the field


def received(verdict: Verdict, rank: int) -> list[int]:
    rows = [row for row in verdict.examples if row.replica == rank]
    return [i for row in rows for i in row.ids or ()]


def test_five_rows_on_two_replicas_use_the_first_one_twice() -> None:
    given = experiment(points(5), updates=1, last_group="process")
    verdict = check(given, Plan(3, 1, 2), dealing(sampled(), 3, 1, 1))
    assert [received(verdict, r) for r in range(2)] == [[0, 2, 4], [1, 3, 0]]
    assert causes(verdict) == ["data.padding_duplicates"]


def test_eight_rows_dealt_twice_leave_half_of_them_unseen() -> None:
    given = experiment(points(8), updates=2)
    verdict = check(given, Plan(2, 1, 2), dealing(sampled_twice(), 2, 1, 1))
    assert [received(verdict, r) for r in range(2)] == [[0, 4], [3, 7]]
    assert causes(verdict) == ["data.double_sharding"]


def test_undealt_rows_are_as_many_as_one_replica_has() -> None:
    given = experiment(points(12), updates=1, last_group="process")
    verdict = check(given, Plan(2, 3, 2), dealing(undealt, 2, 3, 1))
    assert len(set(received(verdict, 0) + received(verdict, 1))) == 2 * 3  # m A, not m A D
    assert causes(verdict) == ["data.not_sharded"]


# -- what is no fault of the data, and what is one more


@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_comes_out_even_and_is_shuffled_anew_is_right(precision: str) -> None:
    given = experiment(lines(24), updates=6, shuffle=True)
    verdict = check(given, Plan(2, 2, 2), dealing(sampled(shuffle=True), 2, 2, 6), precision)
    assert verdict.status == "equivalent", verdict.findings


def test_one_replica_has_nothing_to_share() -> None:
    given = experiment(points(8), updates=2)
    verdict = check(given, Plan(2, 2, 1), dealing(undealt, 2, 2, 2))
    assert verdict.status == "equivalent", verdict.findings


@pytest.mark.parametrize("data", DATA)
def test_the_plans_count_on_other_examples_is_no_second_fault(data: str) -> None:
    plan = Plan(2, 2, 2)
    loop = dealing(undealt, 2, 2, 3, by="plan")
    assert causes(check(case(data, 36, plan), plan, loop)) == ["data.not_sharded"]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_wrong_denominator_beside_it_is_still_seen(precision: str) -> None:
    plan = Plan(2, 3, 2)
    loop = dealing(undealt, 2, 3, 3, by="twice")
    verdict = check(case("lines", 36, plan), plan, loop, precision)
    assert verdict.causes[0] == "data.not_sharded"
    assert len(verdict.causes) == 2


def test_the_plans_count_in_another_order_is_a_fault() -> None:
    """Shuffled otherwise, every update has examples of another count."""
    given = experiment(lines(24), updates=3)
    loop = dealing(sampled(shuffle=True), 2, 2, 3, by="plan")
    verdict = check(given, Plan(2, 2, 2), loop)
    assert verdict.status == "fault"
    assert "differs.examples" not in verdict.causes


def test_half_of_the_data_over_and_over_has_a_general_name() -> None:
    def half(rank: Rank) -> tuple[Any, Any]:
        return rank.dataset, list(range(rank.dp_rank, len(rank.dataset) // 2, rank.D))

    given = experiment(points(32), updates=4)
    verdict = check(given, Plan(2, 2, 2), dealing(half, 2, 2, 4))
    assert causes(verdict) == ["differs.examples"]
    (finding,) = verdict.findings
    assert "came twice" in finding.text
    assert "never came" in finding.text


def test_a_batch_of_the_group_used_twice_and_one_never_has_a_general_name() -> None:
    def doubled(rank: Rank) -> None:
        for group in rank.groups:
            accumulate(rank, [group[0], group[0]], group.count)
            finish(rank)

    verdict = check(experiment(points(24)), Plan(2, 2, 2), doubled)
    assert "differs.examples" in verdict.causes
    assert {round(w, 6) for w in verdict.weights["found"]} >= {2.0, 0.0}


def test_the_audit_names_what_came_and_what_was_planned() -> None:
    verdict = check(experiment(points(24)), Plan(2, 2, 2), with_sampler(2, 2))
    first = replace(verdict.examples[0])
    assert (first.update, first.replica, first.microbatch) == (0, 0, 0)
    assert (first.ids, first.planned, first.by_contents) == ((0, 2), (0, 1), True)
    assert len(verdict.examples) == 3 * 2 * 2
