"""Optimizers, averages and skips: the numbers of the field's toys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from faults.probes import linear, traces
from torch import Tensor, nn

from equivtest import Loss, Plan, Rank
from equivtest.faults import optimizer, planted, skip, state
from equivtest.loops import accumulate

Loop = Callable[[Rank], None]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("loop", "moved"),
    # 8, 6 and -2 after one another: 0.1 * (1 + 0.9875 + 0.6146)
    [(accumulate, -0.1), (optimizer.update_per_microbatch, -0.2602)],
    ids=["right", "per microbatch"],
)
def test_three_updates_of_adam_move_2_6_times_as_far(loop: Loop, moved: float) -> None:
    parts = linear(
        [8.0],
        [6.0],
        [-2.0],
        loss=lambda model, batch: Loss(model(batch).sum(), count=5 * len(batch)),
        count=lambda batch: 5 * len(batch),
        optimizer=adam,
    )
    (trace,) = traces(parts, Plan(1, 3, 1), loop)
    assert trace.updates[-1].after["v"].tolist() == pytest.approx([moved], abs=5e-5)


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v


def decaying(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)


@pytest.mark.parametrize(
    ("loop", "left"),
    # 1 - 0.1 * 0.5, and its cube
    [(accumulate, 0.95), (optimizer.decay_per_microbatch, 0.95**3)],
    ids=["right", "per microbatch"],
)
def test_three_decays_leave_0_8574(loop: Loop, left: float) -> None:
    still = linear([0.0], [0.0], [0.0], model=Ones, optimizer=decaying)
    (trace,) = traces(still, Plan(1, 3, 1), loop)
    assert trace.updates[-1].after["v"].tolist() == pytest.approx([left], abs=1e-12)
    assert 0.95**3 == pytest.approx(0.8574, abs=5e-5)


def adam_95(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.9, 0.95))


@pytest.mark.parametrize(
    ("loop", "factor"),
    # m -> g, v -> g^2, corrected as in the first update: (1 / 0.1) / sqrt(1 / 0.05) = sqrt(5)
    [(accumulate, 1.0), (optimizer.counter_frozen, math.sqrt(5))],
    ids=["right", "frozen"],
)
def test_without_a_count_adam_moves_2_2_times_the_learning_rate(loop: Loop, factor: float) -> None:
    constant = linear([1.0], optimizer=adam_95, updates=150)
    (trace,) = traces(constant, Plan(1, 1, 1), loop)
    last = trace.updates[-1]
    moved = float((last.before["v"] - last.after["v"]).sum())
    assert moved / 0.01 == pytest.approx(factor, rel=1e-3)


class Shadow(nn.Module):
    """An exponential average from 0, decay 0.9."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.v = nn.Buffer(torch.zeros_like(dict(model.named_parameters())["v"]))

    def update_parameters(self, model: Any) -> None:
        self.v.mul_(0.9).add_(model.v.detach(), alpha=0.1)


@pytest.mark.parametrize(
    ("loop", "average"),
    [(accumulate, 0.29), (state.average_per_microbatch, 0.4439)],
    ids=["right", "per microbatch"],
)
def test_an_average_per_microbatch_runs_ahead(loop: Loop, average: float) -> None:
    """The parameter goes 0, 1, 2: 0.9 * 0.1 + 0.2, and 0.1, 0.19, 0.271, then 0.2 to it."""
    climbing = linear(*([[-1.0]] * 6), averages=Shadow, updates=2)
    (trace,) = traces(climbing, Plan(1, 3, 1), loop)
    assert trace.averages_after["v"].tolist() == pytest.approx([average], abs=1e-12)


def offset(model: nn.Module, batch: Tensor) -> Loss:
    """The first column is the gradient, the second only the loss."""
    return Loss((model(batch[:, :1]) + batch[:, 1]).sum(), count=len(batch))


@pytest.mark.parametrize(
    ("loop", "after"),
    [(accumulate, [-1.0, -1.0]), (skip.spikes_by_rank, [-1.0, 0.0])],
    ids=["right", "alone"],
)
def test_the_rank_that_leaves_the_update_out_stays_at_0(loop: Loop, after: list[float]) -> None:
    """The gradient is 1 on both, the loss 0 and 5."""
    rows = linear([1.0, 0.0], [1.0, 5.0], model=Ones0, loss=offset, updates=2, last_group="drop")
    held = []
    for trace in traces(replace(rows, updates=1), Plan(1, 1, 2), loop):
        held += trace.updates[0].after["v"].tolist() if trace.updates else [0.0]
    assert held == after


class Ones0(Ones):
    """The same from 0."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.v)


def test_a_scaler_that_decides_alone_applies_on_one_rank_and_skips_on_the_other() -> None:
    rows = linear([1.0], [1.0], scaler=lambda device: torch.amp.GradScaler(device, init_scale=16.0))
    first, second = traces(
        rows, Plan(1, 1, 2), skip.overflow_of_one_rank, in_precision="fp16-mixed"
    )
    assert first.updates[0].after["v"].tolist() == [-1.0]
    assert second.updates[0].after["v"].tolist() == [0.0]


def test_an_update_on_zeros_moves_the_parameters_and_the_counters() -> None:
    """Adam's second moment estimates of 1, 0: m 0.09 / 0.19, v 0.000999 / 0.001999."""
    rows = linear([1.0], [1.0], optimizer=adam, updates=2)
    (trace,) = traces(rows, Plan(1, 1, 1), skip.update_on_zero)
    second = trace.updates[1]
    moved = 0.1 * (0.09 / 0.19) / math.sqrt(0.000999 / 0.001999)
    assert second.gradient["v"].tolist() == [0.0]
    assert (second.before["v"] - second.after["v"]).tolist() == pytest.approx([moved], abs=1e-8)
    assert float(second.optimizers[0].state_after["v"]["step"]) == 2.0


PLAIN = linear(*([[1.0]] * 6))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("opt.decay_per_microbatch", "the experiment does not decay its weights"),
        ("opt.counter_frozen", "the experiment's optimizer does not count its updates"),
        ("state.ema_per_microbatch", "the experiment has no average of its weights"),
        ("skip.update_on_zero", "one update: there is none after it"),
    ],
)
def test_where_it_cannot_show_it_says_why(name: str, reason: str) -> None:
    assert planted(name).applies(PLAIN, Plan(1, 3, 2)) == reason


@pytest.mark.parametrize(
    "name", ["opt.decay_per_microbatch", "opt.counter_frozen", "state.ema_per_microbatch"]
)
def test_an_experiment_is_given_what_a_kind_needs(name: str) -> None:
    assert planted(name).plant(PLAIN, Plan(1, 3, 2)) is not None
