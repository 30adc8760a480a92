"""Right loops with loaders of their own are judged on the examples that they used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diagnose.loaders import (
    accumulate,
    experiment,
    finish,
    held_as,
    lines,
    pairs,
    points,
    with_sampler,
)

import equivtest
from equivtest import Experiment, Plan, Rank
from equivtest.compare.verdict import Verdict

PLAN = Plan(2, 2, 2)  # 8 examples an update, three updates of 24 examples


def check(given: Experiment, loop: Any, plan: Plan = PLAN, precision: str = "fp64") -> Verdict:
    return equivtest.check(given, plan, precision=precision, loop=loop)


def right(verdict: Verdict) -> Verdict:
    found = [finding.text for finding in verdict.findings]
    assert verdict.status == "equivalent", found or verdict.failure
    return verdict


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize("data", [points(), pairs(), lines()], ids=["dict", "tuple", "padded"])
def test_a_distributed_sampler_interleaves_examples_over_replicas(
    data: Any, precision: str
) -> None:
    verdict = right(check(experiment(data), with_sampler(2, 2), precision=precision))
    assert verdict.card.examples_seen == 24
    assert verdict.notes == ()
    if precision != "bf16-mixed":  # to the bit, as of the plan's own batches
        assert all(row.state == "equal" for row in verdict.rows)


@pytest.mark.parametrize("data", [points(), lines()], ids=["dict", "padded"])
def test_workers_read_elsewhere(data: Any) -> None:
    verdict = right(check(experiment(data), with_sampler(2, 2, workers=1), precision="fp32"))
    assert verdict.card.examples_seen == 24


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_an_order_of_the_loops_own_is_noted(precision: str) -> None:
    loop = with_sampler(2, 2, epochs=2, shuffle=True, seed=3)
    given = experiment(points(), updates=6, shuffle=True)
    verdict = right(check(given, loop, precision=precision))
    (note,) = verdict.notes
    assert note.startswith("the loop has an order of its own from update 0 on")


def test_a_last_group_may_be_shorter() -> None:
    verdict = right(check(experiment(points(22), last_group="process"), with_sampler(2, 2)))
    assert verdict.card.examples_seen == 22


def test_whole_batches_may_be_dealt_in_turn() -> None:
    """As accelerate does: rank r takes every D-th batch."""

    def dealt(rank: Rank) -> None:
        loader = torch.utils.data.DataLoader(rank.dataset, batch_size=2)  # type: ignore[arg-type]
        own = [b for k, b in enumerate(loader) if k % rank.D == rank.dp_rank]
        for u in range(0, len(own), 2):
            accumulate(rank, [held_as(rank, b) for b in own[u : u + 2]], 8)
            finish(rank)

    right(check(experiment(points()), dealt, precision="fp32"))


def test_a_loss_of_the_loops_own_tells_by_what_the_model_received() -> None:
    def own(rank: Rank) -> None:
        loader = torch.utils.data.DataLoader(
            rank.dataset,  # type: ignore[arg-type]
            batch_size=2,
            sampler=range(rank.dp_rank, 24, rank.D),
        )
        for k, batch in enumerate(loader):
            batch = held_as(rank, batch)
            loss = (rank.model(batch["x"]) - batch["y"]).square().sum()
            (loss / 8 * rank.D).backward()
            if k % 2:
                finish(rank)

    verdict = check(experiment(points()), own)
    assert verdict.card.examples_seen == 24
    right(verdict)


def test_equal_examples_are_told_apart_as_the_plan_would_have_them() -> None:
    twice = points(12) * 2
    verdict = right(check(experiment(twice), with_sampler(2, 2, shuffle=True, seed=1)))
    assert verdict.card.examples_seen == 24


def test_a_padded_batch_whose_repeats_weigh_nothing_is_right() -> None:
    """Three examples for two replicas of two: the fourth is a repeat, times zero."""

    def masked(rank: Rank) -> None:
        ids = [0, 1] if rank.dp_rank == 0 else [2, 0]
        batch = held_as(rank, torch.utils.data.default_collate([rank.dataset[i] for i in ids]))
        weight = torch.tensor([1.0, 1.0 if rank.dp_rank == 0 else 0.0])
        errors = (rank.model(batch["x"]) - batch["y"]).square()
        ((errors * weight).sum() / 3 * rank.D).backward()
        finish(rank)

    given = experiment(points(3), updates=1, last_group="process")
    right(check(given, masked, Plan(2, 1, 2)))
