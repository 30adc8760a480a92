"""Windows: what happens to the microbatches that do not fill a group at the end of an epoch."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Rank
from equivtest.faults.pieces import accumulated, backward, finish, no_sync, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting
from equivtest.plan import Plan


def _full(rank: Rank) -> int:
    """Microbatches of a full group: the A that the loop was configured with."""
    return max(map(len, rank.groups))


def partial_divisor(rank: Rank) -> None:
    """The means of a shorter group are divided by A all the same."""
    A = _full(rank)
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                mean = right(rank, group, batch) * len(group)
                backward(rank, mean / A)
        finish(rank)


def tail_dropped(rank: Rank) -> None:
    """``for _ in range(microbatches // A)``: what is left is never reached."""
    A = _full(rank)
    for group in rank.groups:
        if len(group) < A:
            continue
        accumulated(rank, group)
        finish(rank)


def tail_leaks(rank: Rank) -> None:
    """``if (k + 1) % A == 0``, with k counted anew in every epoch and no clear before it."""
    A = _full(rank)
    for group in rank.groups:
        for k, batch in enumerate(group):
            with nullcontext() if (k + 1) % A == 0 else no_sync(rank):
                backward(rank, right(rank, group, batch))
        if len(group) == A:
            finish(rank)


# -- where they show


def ends_short(setting: Setting) -> str:
    """Some group has fewer microbatches than A."""
    if any(len(group.ids[0]) < setting.accumulations for group in setting.groups):
        return ""
    return "every group has A microbatches: there is no shorter last one"


def goes_on(setting: Setting) -> str:
    """A group follows the shorter one."""
    if any(len(group.ids[0]) < setting.accumulations for group in setting.groups[:-1]):
        return ""
    return "no group follows a shorter last one: run into the next epoch"


def shortened(experiment: Experiment, plan: Plan) -> Experiment:
    """Two epochs of a full group and one microbatch a replica."""
    kept = plan.examples + plan.sizes[0] * plan.D
    data = [experiment.data[i] for i in range(min(kept, len(experiment.data)))]
    return replace(experiment, data=data, last_group="process", updates=4)


FAULTS = (
    Planted(
        "window.partial_divisor",
        Cause.PARTIAL_DIVISOR,
        "transformers #38837",
        partial_divisor,
        conditions=(ends_short,),
        shaped=shortened,
    ),
    Planted(
        "window.tail_dropped",
        Cause.TAIL_DROPPED,
        "ultralytics #11217",
        tail_dropped,
        conditions=(ends_short,),
        shaped=shortened,
    ),
    Planted(
        "window.tail_leaks",
        Cause.TAIL_LEAKS,
        "AnimaLoraStudio #305",
        tail_leaks,
        conditions=(goes_on,),
        shaped=shortened,
    ),
)
