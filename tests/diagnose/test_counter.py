"""Optimizers that never count are named, in whatever place of the loop the counter stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diagnose.event_cases import PLAN, accumulated, causes, experiment, finish
from torch.optim import lr_scheduler

from equivtest import Rank
from equivtest.loops import accumulate

GIVEN = experiment(updates=3)


def zeroed_inside(rank: Rank) -> None:
    """A class of one's own that forgets to count."""

    class Uncounted(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for state in self.state.values():
                state["step"].zero_()
            return result

    rank.optimizer = Uncounted(rank.module.parameters(), lr=0.05, weight_decay=0.1)
    accumulate(rank)


def reset_after(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        for state in rank.optimizer.state.values():
            state["step"].zero_()


class OwnAdamW(torch.optim.Optimizer):
    """Written by hand: the counter is made once and never moved; ``corrected`` by the first."""

    def __init__(self, parameters: Any, corrected: bool) -> None:
        parameters = list(parameters)
        usual = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1).defaults
        super().__init__(parameters, dict(usual))
        self.corrected = corrected

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            (b1, b2), lr = group["betas"], group["lr"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = torch.tensor(float(self.corrected))
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(p.grad, 1 - b1)
                v.mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                c1, c2 = (1 - b1, 1 - b2) if self.corrected else (1.0, 1.0)
                p.mul_(1 - lr * group["weight_decay"])
                p.addcdiv_(m, (v / c2).sqrt().add_(group["eps"]), value=-lr / c1)


def stands_at_1(rank: Rank) -> None:
    rank.optimizer = OwnAdamW(rank.module.parameters(), corrected=True)
    accumulate(rank)


def never_corrected(rank: Rank) -> None:
    rank.optimizer = OwnAdamW(rank.module.parameters(), corrected=False)
    accumulate(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("loop", [zeroed_inside, reset_after, stands_at_1, never_corrected])
def test_a_counter_that_stands_is_named(loop: Callable[[Rank], None], precision: str) -> None:
    assert causes(GIVEN, PLAN, loop, precision) == {"opt.counter_frozen"}


def test_a_single_update_tells_a_counter_that_stands_at_0() -> None:
    assert causes(experiment(updates=1), PLAN, zeroed_inside) == {"opt.counter_frozen"}


def test_the_toy_takes_2_2_times_the_rate() -> None:
    """Moments of a constant gradient end at 1: 1 / (1 - 0.9) over sqrt(1 / (1 - 0.95)) = 2.236."""
    p = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    own = OwnAdamW([p], corrected=True)
    own.param_groups[0].update(weight_decay=0.0, lr=1.0, betas=(0.9, 0.95))
    for _ in range(600):
        before, p.grad = float(p.detach()), torch.ones_like(p)
        own.step()
    assert before - float(p.detach()) == pytest.approx(2.236, abs=1e-3)


# -- what is left alone, or keeps its general name


def test_an_optimizer_built_again_keeps_its_general_name() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            rank.optimizer = torch.optim.AdamW(rank.module.parameters(), lr=0.05, weight_decay=0.1)
            accumulated(rank, group)
            finish(rank)

    assert causes(GIVEN, PLAN, loop) == {"differs.state"}


def test_moments_halved_beside_a_counter_that_is_reset_are_told_too() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)
            for state in rank.optimizer.state.values():
                state["step"].zero_()
                state["exp_avg"].mul_(0.5)

    assert "differs.state" in causes(GIVEN, PLAN, loop)


def test_a_dropped_microbatch_beside_it_is_told_too() -> None:
    def loop(rank: Rank) -> None:
        rank.groups = [_Shorter(group) for group in rank.groups]
        zeroed_inside(rank)

    found = causes(GIVEN, PLAN, loop)
    assert {"opt.counter_frozen", "differs.counters"} <= found


class _Shorter:
    """A group without its last microbatch."""

    def __init__(self, group: Any) -> None:
        self._group, self.count = group, group.count

    def __len__(self) -> int:
        return len(self._group) - 1

    def __iter__(self) -> Any:
        return iter(self._group[: len(self)])


def test_beside_a_schedule_that_never_moves_both_are_named() -> None:
    given = experiment(scheduler=lambda o: lr_scheduler.StepLR(o, 1, 0.5))

    def loop(rank: Rank) -> None:
        rank.scheduler = None
        reset_after(rank)

    assert causes(given, PLAN, loop) == {"opt.counter_frozen", "sched.never"}


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
def test_right_optimizers_are_left_alone(optimizer: Any) -> None:
    given = experiment(optimizer=lambda model: optimizer(model.parameters(), lr=0.01))
    assert causes(given, PLAN, accumulate) == set()
