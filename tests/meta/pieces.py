"""What planted loops share with the recipe, so that each loop shows nothing but its own mistake."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from equivtest import Group, Rank
from equivtest.loops import advance, update


def reducing_last(rank: Rank, group: Group, k: int) -> AbstractContextManager[Any]:
    """Reduce with the last microbatch's backward only."""
    return nullcontext() if k == len(group) - 1 else rank.model.no_sync()


def backward(rank: Rank, objective: Tensor) -> None:
    """Backward through the scaler, where there is one."""
    (rank.scaler.scale(objective) if rank.scaler else objective).backward()


def right(rank: Rank, group: Group, batch: Any) -> Tensor:
    """Forward one microbatch: its share of the group's loss, times D for the average over ranks."""
    with rank.autocast():
        loss = rank.loss(rank.model, batch)
    return loss.total / group.count * rank.D


def accumulated(rank: Rank, group: Group) -> None:
    """The group's right gradient in ``.grad``."""
    for k, batch in enumerate(group):
        with reducing_last(rank, group, k):
            backward(rank, right(rank, group, batch))


def finish(rank: Rank) -> None:
    """Unscale, clip, update, schedule, clear."""
    applied = update(rank, [rank.optimizer])
    advance(rank, "attempted")
    if applied:
        advance(rank, "applied")
    rank.optimizer.zero_grad()


def bare(module: nn.Module) -> nn.Module:
    """No wrapper: the loop reduces by itself."""
    return module


def averaged(rank: Rank) -> None:
    """Average every gradient over the ranks, as an averaging wrapper does."""
    for parameter in rank.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(rank.D)
            dist.all_reduce(parameter.grad, group=rank.dp_group)
