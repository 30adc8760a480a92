"""Averages of weights that are off are named by what moves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diagnose.event_cases import (
    EQUAL,
    PLAN,
    causes,
    experiment,
    finish,
    microbatches,
    traces,
    verdict,
)
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.loops import accumulate


def shadow(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


AVERAGED = experiment(averages=shadow)


def _calls(rank: Rank, move: Callable[[str], int]) -> None:
    """The recipe with so many calls after each ``backward``, before and after each ``update``."""
    average = rank.average

    def moved(when: str) -> None:
        for _ in range(move(when)):
            average.update_parameters(rank.module)

    for group in rank.groups:
        for k in microbatches(rank, group):
            moved("backward" if k < len(group) - 1 else "last backward")
        moved("before")
        rank_average, rank.average = rank.average, None
        finish(rank)
        rank.average = rank_average
        moved("after")


def at_each_iteration(rank: Rank) -> None:
    """One loop over microbatches that ends with the average, the way trainers are written."""
    _calls(rank, lambda when: int(when in ("backward", "after")))


def after_each_backward(rank: Rank) -> None:
    _calls(rank, lambda when: int("backward" in when))


def before_update(rank: Rank) -> None:
    _calls(rank, lambda when: int(when == "before"))


def never(rank: Rank) -> None:
    _calls(rank, lambda when: 0)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (at_each_iteration, "state.ema_per_microbatch"),
        (after_each_backward, "state.ema_per_microbatch"),
        (before_update, "state.ema_before_update"),
        (never, "state.ema_never"),
    ],
)
def test_what_moves_the_average_is_named(
    loop: Callable[[Rank], None], cause: str, plan: Plan, precision: str
) -> None:
    assert causes(AVERAGED, plan, loop, precision) == {cause}


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_right_average_is_left_alone(precision: str) -> None:
    assert causes(AVERAGED, PLAN, accumulate, precision) == set()
    once = lambda rank: _calls(rank, lambda when: int(when == "after"))  # noqa: E731
    assert causes(AVERAGED, PLAN, once, precision) == set()


def test_an_average_of_another_decay_keeps_its_general_name() -> None:
    def loop(rank: Rank) -> None:
        rank.average.multi_avg_fn = get_ema_multi_avg_fn(0.8)
        accumulate(rank)

    assert causes(AVERAGED, PLAN, loop) == {"differs.state"}


def test_state_edited_beside_an_average_that_is_off_is_told_too() -> None:
    @torch.no_grad()
    def loop(rank: Rank) -> None:
        with torch.enable_grad():
            never(rank)
        next(rank.module.parameters()).mul_(2.0)

    assert causes(AVERAGED, PLAN, loop) == {"state.ema_never", "differs.state"}


def test_beside_a_schedule_that_is_off_both_are_named() -> None:
    given = replace(
        AVERAGED, scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1 - n / 12)
    )

    def loop(rank: Rank) -> None:
        rank.scheduler = None
        at_each_iteration(rank)

    found = causes(given, PLAN, loop)
    assert found == {"state.ema_per_microbatch", "sched.never"}


# -- the toy: decay 0.9, weights 0 -> 1 -> 2, A=3: 0.29 is right, 0.4439 per microbatch


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.w * x


def begun(model: nn.Module) -> AveragedModel:
    """Torch's own first call would copy the weights."""
    average = shadow(model)
    average.n_averaged.fill_(1)
    return average


TOY = Experiment(
    model=Line,
    data=[torch.tensor(-1.0)] * 3,  # each update adds 1
    loss=lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    averages=begun,
    updates=2,
)


@pytest.mark.parametrize(
    ("loop", "average", "named"),
    [(accumulate, 0.29, ()), (at_each_iteration, 0.4439, ("state.ema_per_microbatch",))],
)
def test_the_toy_of_the_average(
    loop: Callable[[Rank], None], average: float, named: tuple[str, ...]
) -> None:
    """0.9 * 0.1 + 0.1 * 2; and 0, 0, 0.1, then 0.19, 0.271 and 0.9 * 0.271 + 0.1 * 2."""
    plan = Plan(1, 3, 1)
    assert verdict(TOY, plan, loop).causes == named
    (trace,) = traces(TOY, plan, loop)
    assert float(trace.averages_after["module.w"]) == pytest.approx(average, abs=1e-12)
