"""Weight decay with every microbatch is named, and the gradient judged where each one started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnose.event_cases import (
    EQUAL,
    PLAN,
    accumulated,
    causes,
    experiment,
    finish,
    microbatches,
    traces,
    verdict,
)
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.loops import accumulate

GIVEN = experiment(updates=2)


@torch.no_grad()
def decayed(rank: Rank, decay: float | None = None, rate: float = 1.0) -> None:
    for group in rank.optimizer.param_groups:
        own = group["weight_decay"] if decay is None else decay
        for parameter in group["params"]:
            parameter.mul_(1 - rate * group["lr"] * own)


def between(rank: Rank) -> None:
    """After every microbatch but the last; the optimizer decays with that one."""
    for group in rank.groups:
        for k in microbatches(rank, group):
            if k < len(group) - 1:
                decayed(rank)
        finish(rank)


def after_each(rank: Rank) -> None:
    """By hand only: the optimizer's own decay is switched off."""
    for held in rank.optimizer.param_groups:
        held["weight_decay"] = 0.0
    for group in rank.groups:
        for _ in microbatches(rank, group):
            decayed(rank, 0.1)
        finish(rank)


def at_each_iteration(rank: Rank) -> None:
    """At the end of the inner loop, so after the update too."""
    for group in rank.groups:
        for k in microbatches(rank, group):
            if k == len(group) - 1:
                finish(rank)
            decayed(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
@pytest.mark.parametrize("loop", [between, after_each, at_each_iteration])
def test_decay_with_every_microbatch_is_named(
    loop: Callable[[Rank], None], plan: Plan, precision: str
) -> None:
    assert causes(GIVEN, plan, loop, precision) == {"opt.decay_per_microbatch"}


def test_a_weight_that_is_off_beside_it_is_told_too() -> None:
    """The second microbatch of each group counts 1.5 times, from decayed parameters."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                loss = rank.loss(rank.model, batch)
                factor = 1.5 if k == 1 else 1.0
                (factor * loss.total / group.count * rank.D).backward()  # type: ignore[union-attr]
                if k < len(group) - 1:
                    decayed(rank)
            finish(rank)

    found = causes(GIVEN, PLAN, loop)
    assert {"opt.decay_per_microbatch", "differs.gradient"} <= found


# -- what keeps its general name


def _shrinking(rate: float) -> Callable[[Rank], None]:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k in microbatches(rank, group):
                if k < len(group) - 1:
                    decayed(rank, rate=rate)
            finish(rank)

    return loop


def test_another_factor_keeps_its_general_name() -> None:
    found = causes(GIVEN, PLAN, _shrinking(0.7))
    assert "differs.state" in found
    assert "opt.decay_per_microbatch" not in found


def test_one_decay_too_many_per_update_keeps_its_general_name() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)
            decayed(rank)

    assert causes(GIVEN, PLAN, loop) == {"differs.state"}


def test_a_right_decay_is_left_alone() -> None:
    assert causes(GIVEN, PLAN, accumulate) == set()


# -- the toy: lr 0.1, decay 0.5, A=3: 0.95 is right, 0.95 ** 3 = 0.8574 by microbatch


class Still(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return 0.0 * self.w * x


def _sgd(model: Any) -> Any:
    """Whose decay is one with the gradient; without a gradient it is lr * decay alone."""
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)


TOY = Experiment(
    model=Still,
    data=[torch.tensor(1.0)] * 3,
    loss=lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
    count=len,
    optimizer=_sgd,
    updates=1,
)


@pytest.mark.parametrize(
    ("loop", "left", "named"),
    [(accumulate, 0.95, ()), (between, 0.857375, ("opt.decay_per_microbatch",))],
)
def test_the_toy_of_the_decay(
    loop: Callable[[Rank], None], left: float, named: tuple[str, ...]
) -> None:
    plan = Plan(1, 3, 1)
    assert verdict(TOY, plan, loop).causes == named
    (trace,) = traces(TOY, plan, loop)
    assert float(trace.updates[0].after["w"]) == pytest.approx(left, abs=1e-12)
