"""A scheduler whose horizon is longer: the same values, each as many calls later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import lr_scheduler

from equivtest.compare.optimizer import ExpectedOptimizers

HORIZONS = ("T_max", "T_0", "T_i", "total_iters", "total_steps", "step_size", "step_size_up")
"""Attributes of torch's schedulers that count calls."""


def stretched(expected: ExpectedOptimizers, times: int) -> bool:
    """Stretch all schedulers before their first call; False where one cannot be."""
    return all(_stretch(scheduler, times) for scheduler in expected.schedulers)


def _stretch(scheduler: Any, times: int) -> bool:
    several = getattr(scheduler, "_schedulers", None)
    if several is not None:  # a chain or a sequence
        milestones = getattr(scheduler, "_milestones", None)
        if milestones is not None:
            scheduler._milestones = [times * m for m in milestones]
        return all(_stretch(one, times) for one in several)
    if isinstance(scheduler, lr_scheduler.LambdaLR):
        scheduler.lr_lambdas = [_slower(f, times) for f in scheduler.lr_lambdas]
        return True
    if isinstance(scheduler, lr_scheduler.MultiStepLR):
        scheduler.milestones = type(scheduler.milestones)(
            {times * m: n for m, n in scheduler.milestones.items()}
        )
        return True
    if isinstance(scheduler, lr_scheduler.OneCycleLR):
        for phase in scheduler._schedule_phases:
            phase["end_step"] = (phase["end_step"] + 1) * times - 1
    held = [key for key in HORIZONS if isinstance(getattr(scheduler, key, None), (int, float))]
    for key in held:
        setattr(scheduler, key, times * getattr(scheduler, key))
    return bool(held)


def _slower(schedule: Callable[[Any], Any], times: int) -> Callable[[int], Any]:
    return lambda calls: schedule(calls / times)
