"""Schedules and counters that count something else: the numbers of probe U and of its relatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from faults.probes import PROBE_U, linear, traces

from equivtest import Experiment, Plan, Rank
from equivtest.faults import counts, planted, schedule
from equivtest.loops import accumulate
from equivtest.observe.trace import Trace

Loop = Callable[[Rank], None]
PLAN_U = Plan(1, 3, 2)


def learning_rate(trace: Trace) -> float:
    """When the loop had ended."""
    (((_, held),),) = trace.groups_after
    return float(held["lr"])


@pytest.mark.parametrize(
    ("loop", "lr"),
    [
        (accumulate, 0.75),
        # 9 calls of 12, 6 of 12, 3 of 36
        (schedule.per_microbatch, 0.25),
        (schedule.per_process, 0.5),
        (counts.long_horizon, 1 - 3 / 36),
    ],
    ids=["right", "per microbatch", "per process", "long horizon"],
)
def test_probe_u_tells_what_the_schedule_counts(loop: Loop, lr: float) -> None:
    for trace in traces(PROBE_U, PLAN_U, loop):
        assert learning_rate(trace) == pytest.approx(lr, abs=1e-12)


def own_scaler(rank: Rank) -> None:
    rank.scaler = schedule.overflowing_scaler(rank)
    accumulate(rank)


@pytest.mark.parametrize(
    ("loop", "lr"), [(own_scaler, 11 / 12), (schedule.on_skip, 10 / 12)], ids=["right", "on skip"]
)
def test_a_skipped_update_moves_no_schedule_in_applied_updates(loop: Loop, lr: float) -> None:
    """Of two updates the first overflows: one call of 12 is right."""
    (trace,) = traces(replace(PROBE_U, updates=2), Plan(1, 1, 1), loop, in_precision="fp16-mixed")
    assert [update.applied for update in trace.updates] == [False, True]
    assert learning_rate(trace) == pytest.approx(lr, abs=1e-12)


@pytest.mark.parametrize(
    ("loop", "updates"), [(accumulate, 3), (counts.stopped_early, 1)], ids=["right", "stopped"]
)
def test_a_limit_in_updates_is_reached_a_times_too_early_in_microbatches(
    loop: Loop, updates: int
) -> None:
    for trace in traces(PROBE_U, PLAN_U, loop):
        assert len(trace.updates) == updates


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)


def test_a_cosine_of_twice_the_length_is_half_way_where_it_should_have_ended() -> None:
    """6 calls of 12: (1 + cos(pi / 2)) / 2 = 0.5; of 6: 0."""
    cut = replace(PROBE_U, scheduler=cosine, updates=6)
    (right,) = traces(cut, Plan(1, 2, 1), accumulate)
    (long,) = traces(cut, Plan(1, 2, 1), counts.long_horizon)
    assert learning_rate(right) == pytest.approx(0.0, abs=1e-12)
    assert learning_rate(long) == pytest.approx(0.5, abs=1e-12)


def stepwise(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


UNSCHEDULED = linear(*([[1.0]] * 18), updates=3)


@pytest.mark.parametrize(
    ("name", "experiment", "precision", "reason"),
    [
        ("sched.per_microbatch", UNSCHEDULED, "fp64", "the experiment has no scheduler"),
        (
            "sched.per_microbatch",
            replace(PROBE_U, scheduler_unit="microbatch"),
            "fp64",
            "the experiment's schedule counts microbatches",
        ),
        ("sched.steps_on_skip", PROBE_U, "fp32", "only a scaler skips updates (fp16-mixed)"),
        (
            "sched.steps_on_skip",
            replace(PROBE_U, scheduler_unit="attempted"),
            "fp16-mixed",
            "the experiment's schedule counts in attempted units",
        ),
        (
            "count.micro_vs_update/horizon",
            replace(PROBE_U, scheduler=stepwise),
            "fp64",
            "the experiment's scheduler has no length that we know",
        ),
        ("count.micro_vs_update", replace(PROBE_U, updates=1), "fp64", "one update: "),
        ("count.wrong_dp_size", PROBE_U, "fp64", "needs tp > 1, which this version does not run"),
        ("sched.per_process", PROBE_U, "fp64", ""),
    ],
)
def test_where_it_cannot_show_it_says_why(
    name: str, experiment: Experiment, precision: str, reason: str
) -> None:
    told = planted(name).applies(experiment, PLAN_U, precision)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_an_experiment_is_given_the_schedule_that_a_kind_needs() -> None:
    for name in ("sched.per_microbatch", "sched.per_process", "count.micro_vs_update/horizon"):
        made = planted(name).plant(UNSCHEDULED, PLAN_U)
        assert made is not None
        assert made.experiment.scheduler is not None
        kept = planted(name).plant(PROBE_U, PLAN_U)
        assert kept is not None
        assert kept.experiment is PROBE_U
