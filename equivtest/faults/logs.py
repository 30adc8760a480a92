"""Logs: the gradients are right, and what the loop reports as its loss is not."""

from __future__ import annotations

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import backward, finish, reducing_last, right, summed
from equivtest.faults.planting import Planted
from equivtest.faults.setting import accumulates, replicates


def factor_of_accumulations(rank: Rank) -> None:
    """The mean over microbatches of what is a share of the group's loss already: 1/A of it."""
    for group in rank.groups:
        reported = 0.0
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                share = right(rank, group, batch)
                backward(rank, share)
            reported += float(share.detach()) / len(group)
        rank.report(summed(rank, reported) / rank.D)
        finish(rank)


def factor_of_replicas(rank: Rank) -> None:
    """The objective, which has the D that undoes the wrapper's average, summed over ranks: D."""
    for group in rank.groups:
        reported = 0.0
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                share = right(rank, group, batch)
                backward(rank, share)
            reported += float(share.detach())
        rank.report(summed(rank, reported))
        finish(rank)


FAULTS = (
    Planted(
        "log.loss_factor",
        Cause.LOSS_FACTOR,
        "Lightning #2569",
        factor_of_accumulations,
        conditions=(accumulates,),
    ),
    Planted(
        "log.loss_factor/replicas",
        Cause.LOSS_FACTOR,
        "Lightning #2569",
        factor_of_replicas,
        conditions=(replicates,),
    ),
)
