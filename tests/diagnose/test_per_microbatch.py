"""Loops that update after every microbatch are named, and judged on each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diagnose.event_cases import EQUAL, PLAN, causes, experiment, finish, traces, verdict
from torch import Tensor, nn
from torch.optim import lr_scheduler

from equivtest import Experiment, Loss, Plan, Rank

GIVEN = experiment(updates=2)


def each_microbatch(rank: Rank) -> None:
    """The update stands in the inner loop; no ``no_sync``, as each backward must reduce."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            objective = loss.total / group.count * rank.D  # type: ignore[union-attr]
            (rank.scaler.scale(objective) if rank.scaler else objective).backward()
            finish(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_an_update_after_each_microbatch_is_named(plan: Plan, precision: str) -> None:
    assert causes(GIVEN, plan, each_microbatch, precision) == {"opt.update_per_microbatch"}


@pytest.mark.parametrize("unit", ["applied", "microbatch"])
def test_beside_a_right_schedule_nothing_else_is_named(unit: Any) -> None:
    given = replace(
        GIVEN,
        scheduler=lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 - n / 100),
        scheduler_unit=unit,
    )

    def loop(rank: Rank) -> None:
        scheduler, rank.scheduler = rank.scheduler, None
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch)
                (loss.total / group.count * rank.D).backward()  # type: ignore[union-attr]
                if unit == "microbatch":
                    scheduler.step()
                rank.optimizer.step()
                if unit == "applied":
                    scheduler.step()
                rank.optimizer.zero_grad()

    assert causes(given, PLAN, loop) == {"opt.update_per_microbatch"}


def test_beside_a_clip_left_out_both_are_named() -> None:
    given = replace(GIVEN, clip_norm=1e-3)

    def loop(rank: Rank) -> None:
        rank.clip_norm = None
        each_microbatch(rank)

    assert causes(given, PLAN, loop) == {"opt.update_per_microbatch", "clip.missing"}


def test_a_weight_that_is_off_beside_it_is_told_too() -> None:
    """The second microbatch of each group counts 1.5 times."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                loss = rank.loss(rank.model, batch)
                factor = 1.5 if k == 1 else 1.0
                (factor * loss.total / group.count * rank.D).backward()  # type: ignore[union-attr]
                finish(rank)

    found = causes(GIVEN, PLAN, loop)
    assert "opt.update_per_microbatch" in found
    assert "differs.gradient" in found


def test_an_update_asked_for_twice_keeps_its_general_name() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch)
                (loss.total / group.count * rank.D).backward()  # type: ignore[union-attr]
            rank.optimizer.step()
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    found = causes(GIVEN, PLAN, loop)
    assert "differs.counters" in found
    assert "opt.update_per_microbatch" not in found


class Accumulating(torch.optim.AdamW):
    """Called for every microbatch, and updates with the last of a group."""

    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls % PLAN.A else super().step(closure)


def test_an_optimizer_that_accumulates_in_itself_is_no_update_per_microbatch() -> None:
    def loop(rank: Rank) -> None:
        rank.optimizer = Accumulating(rank.module.parameters(), lr=0.05, weight_decay=0.1)
        for group in rank.groups:
            for batch in group:
                loss = rank.loss(rank.model, batch)
                (loss.total / group.count * rank.D).backward()  # type: ignore[union-attr]
                rank.optimizer.step()
            rank.optimizer.zero_grad()

    found = causes(GIVEN, Plan(2, 3, 1), loop)
    assert "opt.update_per_microbatch" not in found


# -- the toy: Adam, lr 0.1, parts 8, 6, -2 over 15: -0.1 is right, -0.2602 one by one


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.s * x


TOY = Experiment(
    model=Line,
    data=[torch.tensor(8.0), torch.tensor(6.0), torch.tensor(-2.0)],
    loss=lambda model, batch: Loss(model(batch).sum(), count=5 * len(batch)),
    count=lambda batch: 5 * len(batch),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=0.1),
    updates=1,
)


@pytest.mark.parametrize(
    ("loop", "moved", "named"),
    [(None, -0.1, ()), (each_microbatch, -0.2602, ("opt.update_per_microbatch",))],
)
def test_the_toy_of_adam(
    loop: Callable[[Rank], None] | None, moved: float, named: tuple[str, ...]
) -> None:
    plan = Plan(1, 3, 1)
    assert verdict(TOY, plan, loop).causes == named
    (trace,) = traces(TOY, plan, loop)
    assert float(trace.updates[-1].after["s"]) == pytest.approx(moved, abs=5e-5)
