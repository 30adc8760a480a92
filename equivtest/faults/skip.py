"""Updates that are skipped, or not skipped, by a decision that is wrong."""

from __future__ import annotations

import math

import torch

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import (
    accumulated,
    backward,
    cleared,
    finish,
    reducing_last,
    right,
    summed,
)
from equivtest.faults.planting import Planted
from equivtest.faults.precision import by_fixed_scale, halves, over_deviation
from equivtest.faults.setting import repeats, replicates


def spikes_by_rank(rank: Rank) -> None:
    """A guard against spikes: whoever's loss is above the ranks' mean leaves the update out."""
    for group in rank.groups:
        losses = 0.0
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                objective = right(rank, group, batch)
                backward(rank, objective)
            losses += float(objective.detach())
        if losses > summed(rank, losses) / rank.D:
            cleared(rank)
            continue
        finish(rank)


def overflow_of_one_rank(rank: Rank) -> None:
    """One rank's gradient overflows behind the reduction, and its scaler decides alone."""
    for group in rank.groups:
        accumulated(rank, group)
        if rank.dp_rank == rank.D - 1 and group.update == 0:
            for parameter in rank.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.inf)
        finish(rank)


def update_on_zero(rank: Rank) -> None:
    """What is not finite becomes zero, and the update runs all the same."""
    rank.scaler = None
    weigh = over_deviation()
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                right_share = right(rank, group, batch)
                (weigh(right_share) if group.update == 1 else right_share).backward()
        _zero_nonfinite(rank)
        finish(rank)


def update_on_zero_after_overflow(rank: Rank) -> None:
    """A loss scale of one's own that overflows at first: what is not finite becomes zero."""
    rank.scaler = None
    for group in rank.groups:
        by_fixed_scale(rank, group)
        _zero_nonfinite(rank)
        finish(rank)


def _zero_nonfinite(rank: Rank) -> None:
    for parameter in rank.module.parameters():
        if parameter.grad is not None and not math.isfinite(float(parameter.grad.sum())):
            parameter.grad.zero_()


FAULTS = (
    Planted(
        "skip.rank_local_decision",
        Cause.RANK_LOCAL_DECISION,
        "WeatherGenerator #2724",
        spikes_by_rank,
        conditions=(replicates,),
    ),
    Planted(
        "skip.rank_local_decision/scaler",
        Cause.RANK_LOCAL_DECISION,
        "WeatherGenerator #2724",
        overflow_of_one_rank,
        conditions=(replicates, halves),
    ),
    Planted(
        "skip.update_on_zero",
        Cause.UPDATE_ON_ZERO,
        "flaxchat #6",
        update_on_zero,
        conditions=(repeats,),
    ),
    Planted(
        "skip.update_on_zero/overflow",
        Cause.UPDATE_ON_ZERO,
        "flaxchat #6",
        update_on_zero_after_overflow,
        conditions=(halves,),
    ),
)
