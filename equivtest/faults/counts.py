"""Counters and horizons that count something else than updates or replicas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import accumulated, finish
from equivtest.faults.planting import Planted
from equivtest.faults.schedule import counts_updates, has_scheduler, scheduled
from equivtest.faults.setting import Setting, accumulates, repeats
from equivtest.loops import several

HORIZONS = ("T_max", "total_iters")
"""What torch's schedulers call the length of their way."""


def stopped_early(rank: Rank) -> None:
    """``max_steps`` is meant in updates and counted in microbatches."""
    limit, seen = len(rank.groups), 0
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        seen += len(group)
        if seen >= limit:
            break


def long_horizon(rank: Rank) -> None:
    """The schedule is as long as the loader, and moves once per update."""
    for scheduler in several(rank.scheduler):
        stretch(scheduler, len(rank.groups[0]))
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def stretch(scheduler: Any, factor: int) -> None:
    """Give the scheduler ``factor`` times its length."""
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        scheduler.lr_lambdas = [_slowed(one, factor) for one in scheduler.lr_lambdas]
    for name in HORIZONS:
        if name in vars(scheduler):
            setattr(scheduler, name, getattr(scheduler, name) * factor)


def _slowed(schedule: Callable[[Any], float], factor: int) -> Callable[[int], float]:
    return lambda calls: schedule(calls / factor)


def stops_short(setting: Setting) -> str:
    """The microbatches of one update do not make up for all updates."""
    most = setting.experiment.updates
    return "" if math.ceil(most / setting.plan.A) < most else "it would stop where it has to"


def has_horizon(setting: Setting) -> str:
    """Of an experiment that has a scheduler."""
    scheduler = setting.experiment.scheduler
    assert scheduler is not None
    made = scheduler(setting.optimizer)
    known = [
        isinstance(one, lr_scheduler.LambdaLR) or any(name in vars(one) for name in HORIZONS)
        for one in several(made)
    ]
    return "" if all(known) else "the experiment's scheduler has no length that we know"


def tensor_parallel(setting: Setting) -> str:
    return "needs tp > 1, which this version does not run"


FAULTS = (
    Planted(
        "count.micro_vs_update",
        Cause.MICRO_VS_UPDATE,
        "Lightning #2242",
        stopped_early,
        conditions=(accumulates, repeats, stops_short),
    ),
    Planted(
        "count.micro_vs_update/horizon",
        Cause.MICRO_VS_UPDATE,
        "Lightning #2242",
        long_horizon,
        conditions=(accumulates, repeats, has_scheduler, counts_updates, has_horizon),
        shaped=scheduled,
    ),
    Planted(
        "count.wrong_dp_size",
        Cause.WRONG_DP_SIZE,
        "axolotl #3218",
        conditions=(tensor_parallel,),
    ),
)
