"""Accumulation: what is cleared, and when."""

from __future__ import annotations

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import (
    accumulated,
    advanced,
    backward,
    cleared,
    finish,
    reducing_last,
    right,
)
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates, repeats
from equivtest.loops import several, update


def only_last(rank: Rank) -> None:
    """``zero_grad`` stands inside the loop over microbatches."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            cleared(rank)
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
        finish(rank)


def stale_carryover(rank: Rank) -> None:
    """No ``zero_grad`` anywhere."""
    for group in rank.groups:
        accumulated(rank, group)
        advanced(rank, update(rank, several(rank.optimizer)))


def leak_between_optimizers(rank: Rank) -> None:
    """The last optimizer is cleared: the name that the loop over optimizers left behind."""
    for group in rank.groups:
        accumulated(rank, group)
        optimizers = several(rank.optimizer)
        advanced(rank, update(rank, optimizers))
        for optimizer in optimizers:  # noqa: B007
            pass
        optimizer.zero_grad()


def two_optimizers(setting: Setting) -> str:
    return "" if len(setting.optimizers) > 1 else "the experiment has one optimizer"


FAULTS = (
    Planted(
        "accum.only_last",
        Cause.ONLY_LAST,
        "torchtitan #3575",
        only_last,
        conditions=(accumulates,),
    ),
    Planted(
        "accum.stale_carryover",
        Cause.STALE_CARRYOVER,
        "llm.c #548",
        stale_carryover,
        conditions=(repeats,),
    ),
    Planted(
        "accum.leak_between_optimizers",
        Cause.LEAK_BETWEEN_OPTIMIZERS,
        "Lightning #591",
        leak_between_optimizers,
        conditions=(two_optimizers, repeats),
    ),
)
