"""Costs: graphs that are held longer than they are needed. The numbers are right."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import backward, finish, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates


def deferred_backward(rank: Rank) -> None:
    """The losses of the group are summed, and one backward runs through all of them."""
    for group in rank.groups:
        losses = []
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                losses.append(right(rank, group, batch))
        backward(rank, torch.stack(losses).sum())
        finish(rank)


def kept_graph(rank: Rank) -> None:
    """Losses are kept for a curve, with the graph that they came from."""
    curve: list[Tensor] = []
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = right(rank, group, batch)
                backward(rank, loss)
            curve.append(loss)
        finish(rank)


def several_microbatches(setting: Setting) -> str:
    if setting.accumulations > 1 or len(setting.groups) > 1:
        return ""
    return "one microbatch: there is none after it"


FAULTS = (
    Planted(
        "mem.deferred_backward",
        Cause.DEFERRED_BACKWARD,
        "torchtune #1875",
        deferred_backward,
        conditions=(accumulates,),
    ),
    Planted(
        "mem.kept_graph",
        Cause.KEPT_GRAPH,
        "horovod #641",
        kept_graph,
        conditions=(several_microbatches,),
    ),
)
