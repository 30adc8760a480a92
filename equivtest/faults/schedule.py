"""Schedules that count something else than updates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch.amp import GradScaler
from torch.optim.lr_scheduler import LambdaLR

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Rank
from equivtest.faults.pieces import (
    accumulated,
    backward,
    finish_unscheduled,
    reducing_last,
    right,
)
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates, replicates
from equivtest.loops import several
from equivtest.plan import Plan

OVERFLOWING = 2.0**40
BACKOFF = 2.0**-36


def moved(schedulers: Any) -> None:
    """Move every scheduler once."""
    for scheduler in several(schedulers):
        scheduler.step()


def per_microbatch(rank: Rank) -> None:
    """``scheduler.step()`` one level too deep."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            moved(rank.scheduler)
        finish_unscheduled(rank)


def per_process(rank: Rank) -> None:
    """A wrapped scheduler that moves once for each process, as if batches were split over them."""
    for group in rank.groups:
        accumulated(rank, group)
        finish_unscheduled(rank)
        for _ in range(rank.D):
            moved(rank.scheduler)


def on_skip(rank: Rank) -> None:
    """``scheduler.step()`` behind ``scaler.step()``, whether that applied the update or not."""
    rank.scaler = overflowing_scaler(rank)
    for group in rank.groups:
        accumulated(rank, group)
        finish_unscheduled(rank)
        moved(rank.scheduler)


def overflowing_scaler(rank: Rank) -> GradScaler:
    """A scaler whose first scale no float16 gradient holds, and whose next one all do."""
    return GradScaler(rank.device.type, init_scale=OVERFLOWING, backoff_factor=BACKOFF)


# -- experiments with a schedule


def linear_decay(optimizers: Any, over: int) -> Any:
    """From the optimizer's learning rate to 0 in ``over`` calls; one for each optimizer."""
    if isinstance(optimizers, Mapping):
        return {name: linear_decay(one, over) for name, one in optimizers.items()}
    return LambdaLR(optimizers, lambda calls: max(0.0, 1 - calls / over))


def scheduled(experiment: Experiment, plan: Plan) -> Experiment:
    """With a schedule that counts applied updates, long enough not to reach its end by any count.

    Its own, if it has one that does.
    """
    if experiment.scheduler is not None and experiment.scheduler_unit == "applied":
        return experiment
    over = 4 * experiment.updates * max(plan.A, plan.D)
    decay = partial(linear_decay, over=over)
    return replace(experiment, scheduler=decay, scheduler_unit="applied")


# -- where they show


def has_scheduler(setting: Setting) -> str:
    return "" if setting.experiment.scheduler is not None else "the experiment has no scheduler"


def counts_updates(setting: Setting) -> str:
    """Of an experiment that has a scheduler."""
    if setting.experiment.scheduler_unit == "microbatch":
        return "the experiment's schedule counts microbatches"
    return ""


def counts_applied(setting: Setting) -> str:
    """Of an experiment that has a scheduler."""
    if setting.experiment.scheduler_unit != "applied":
        return f"the experiment's schedule counts in {setting.experiment.scheduler_unit} units"
    return ""


def overflows(setting: Setting) -> str:
    if setting.precision.name != "fp16-mixed":
        return "only a scaler skips updates (fp16-mixed)"
    return ""


FAULTS = (
    Planted(
        "sched.per_microbatch",
        Cause.SCHED_PER_MICROBATCH,
        "accelerate #963",
        per_microbatch,
        conditions=(accumulates, has_scheduler, counts_updates),
        shaped=scheduled,
    ),
    Planted(
        "sched.per_process",
        Cause.SCHED_PER_PROCESS,
        "accelerate #2926",
        per_process,
        conditions=(replicates, has_scheduler, counts_updates),
        shaped=scheduled,
    ),
    Planted(
        "sched.steps_on_skip",
        Cause.STEPS_ON_SKIP,
        "Lightning #18828",
        on_skip,
        conditions=(overflows, has_scheduler, counts_applied),
        shaped=scheduled,
    ),
)
