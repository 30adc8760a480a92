"""Updates that ranks skip by themselves, or that run on what replaced an overflow, are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diagnose.event_cases import PLAN, accumulated, causes, experiment, finish, traces, verdict
from torch import Tensor, nn
from torch.optim import lr_scheduler

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.faults.skip import overflow_of_one_rank, spikes_by_rank, update_on_zero
from equivtest.loops import accumulate

GIVEN = experiment(updates=3)
OVERFLOWING = replace(
    GIVEN,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30),
)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
def test_ranks_that_leave_updates_out_apart_are_named(precision: str) -> None:
    assert causes(GIVEN, PLAN, spikes_by_rank, precision) == {"skip.rank_local_decision"}


def test_a_scaler_that_decides_alone_is_named() -> None:
    found = causes(GIVEN, PLAN, overflow_of_one_rank, "fp16-mixed")
    assert found == {"skip.rank_local_decision"}


def test_in_a_later_update_too_and_beside_a_schedule_that_never_moves() -> None:
    given = replace(GIVEN, scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5))

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            if group.update == 2 and rank.dp_rank == 1:
                rank.optimizer.zero_grad()
                continue
            rank.scheduler, kept = None, rank.scheduler
            finish(rank)
            rank.scheduler = kept

    assert causes(given, PLAN, loop) == {"skip.rank_local_decision", "sched.never"}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
def test_an_update_on_zeros_is_named(precision: str) -> None:
    assert causes(GIVEN, PLAN, update_on_zero, precision) == {"skip.update_on_zero"}


def test_an_update_on_what_replaced_an_overflow_is_named() -> None:
    """``nan_to_num_`` and no look at the scaler's mind."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            rank.scaler.unscale_(rank.optimizer)
            for parameter in rank.module.parameters():
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)  # type: ignore[union-attr]
            rank.optimizer.step()
            rank.scaler.update()
            rank.optimizer.zero_grad()

    named = causes(OVERFLOWING, PLAN, loop, "fp16-mixed")
    assert named == {"skip.update_on_zero"}


# -- what is left alone, or keeps its general name


def test_a_skip_on_every_rank_is_left_alone() -> None:
    found = verdict(OVERFLOWING, PLAN, accumulate, "fp16-mixed")
    assert not found.updates[0].applied
    assert not {name for name in found.causes if not name.startswith("source.")}


def test_an_update_that_no_rank_asks_for_is_told_as_that() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            if group.update == 1:
                rank.optimizer.zero_grad()
            else:
                finish(rank)

    found = verdict(GIVEN, PLAN, loop)
    assert found.causes == ("differs.skip",)
    assert "no rank asked for an update after the microbatches of group 1" in found.findings[0].text


def test_replicas_that_only_drift_have_decided_nothing() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)
            with torch.no_grad():
                next(rank.module.parameters()).add_(0.1 * rank.dp_rank)

    assert "skip.rank_local_decision" not in causes(GIVEN, PLAN, loop)


# -- the toy: one update of lr 1 on a gradient of 1; who finds an overflow stays: -1 and 0


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


TOY = Experiment(
    model=Line,
    data=[torch.tensor(1.0)] * 2,
    loss=lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    updates=1,
)


def unless_overflow(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        (grad,) = [p.grad for p in rank.module.parameters()]
        if rank.dp_rank == 1:
            grad.fill_(torch.inf)  # type: ignore[union-attr]
        if torch.isfinite(grad):  # type: ignore[arg-type]
            rank.optimizer.step()


@pytest.mark.parametrize(
    ("loop", "weights", "named"),
    [
        (accumulate, [-1.0, -1.0], ()),
        (unless_overflow, [-1.0, 0.0], ("skip.rank_local_decision",)),
    ],
)
def test_the_toy_of_ranks_apart(
    loop: Callable[[Rank], None], weights: list[float], named: tuple[Any, ...]
) -> None:
    plan = Plan(1, 1, 2)
    assert verdict(TOY, plan, loop).causes == named
    left = [
        float(trace.updates[0].after["w"]) if trace.updates else 0.0
        for trace in traces(TOY, plan, loop)
    ]
    assert left == weights
