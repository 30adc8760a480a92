"""What planted loops share with the recipe, so that each loop shows nothing but its own mistake."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from equivtest.experiment import Group, Loss, LossResult, Rank
from equivtest.loops import advance, normalised, several, update


def no_sync(rank: Rank) -> AbstractContextManager[Any]:
    """No reduction inside; nothing where the wrapper never reduces by itself."""
    return rank.model.no_sync() if hasattr(rank.model, "no_sync") else nullcontext()


def reducing_last(rank: Rank, group: Group, k: int) -> AbstractContextManager[Any]:
    """Reduce with the last microbatch's backward only."""
    return nullcontext() if k == len(group) - 1 else no_sync(rank)


def forward(rank: Rank, batch: Any) -> LossResult:
    """The microbatch's loss, through the wrapper and under the precision's autocast."""
    with rank.autocast():
        return rank.loss(rank.model, batch)


def backward(rank: Rank, objective: Tensor) -> None:
    """Backward through the scaler, where there is one."""
    (rank.scaler.scale(objective) if rank.scaler else objective).backward()


def right(rank: Rank, group: Group, batch: Any) -> Tensor:
    """Forward one microbatch: its share of the group's loss, times D for the average over ranks."""
    return normalised(forward(rank, batch), group) * rank.D


def over(loss: LossResult, count: Any) -> Tensor:
    """The loss's totals, each over its count (one number, or a mapping by term); over 1, not 0."""
    if isinstance(loss, Loss):
        return loss.total / (float(count) or 1.0)
    shares = [term.total / (float(count[name]) or 1.0) for name, term in loss.items()]
    return torch.stack(shares).sum()


def own_count(loss: LossResult) -> Any:
    """Supervised elements of the microbatch itself: one number, or a mapping by term."""
    if isinstance(loss, Loss):
        return float(loss.count)
    return {name: float(term.count) for name, term in loss.items()}


def summed(rank: Rank, count: Any) -> Any:
    """Counts added up over the replicas."""
    if isinstance(count, Mapping):
        return {name: summed(rank, own) for name, own in count.items()}
    total = torch.tensor(float(count), dtype=torch.float64, device=rank.device)
    dist.all_reduce(total, group=rank.dp_group)
    return float(total)


def accumulated(rank: Rank, group: Group) -> None:
    """The group's right gradient in ``.grad``, scaled where there is a scaler."""
    for k, batch in enumerate(group):
        with reducing_last(rank, group, k):
            backward(rank, right(rank, group, batch))


def accumulated_alone(rank: Rank, group: Group) -> None:
    """The same without any reduction."""
    for batch in group:
        with no_sync(rank):
            backward(rank, right(rank, group, batch))


def finish(rank: Rank) -> None:
    """Unscale, clip, update, schedule, average, clear."""
    settle(rank, update(rank, several(rank.optimizer)))


def updated(rank: Rank) -> bool:
    """The update without a clip; False if the scaler skipped it."""
    optimizers = several(rank.optimizer)
    if rank.scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return True
    scale = rank.scaler.get_scale()
    for optimizer in optimizers:
        rank.scaler.step(optimizer)
    rank.scaler.update()
    return bool(rank.scaler.get_scale() >= scale)


def settle(rank: Rank, applied: bool) -> None:
    """What follows an attempted update: schedule, average, clear."""
    advanced(rank, applied)
    cleared(rank)


def advanced(rank: Rank, applied: bool) -> None:
    """Move the schedule, and the average of the weights if the update was applied."""
    advance(rank, "attempted")
    if applied:
        advance(rank, "applied")
        if rank.average is not None:
            rank.average.update_parameters(rank.module)


def finish_unscheduled(rank: Rank) -> None:
    """Unscale, clip, update, average, clear: the schedule is the loop's own business."""
    if update(rank, several(rank.optimizer)) and rank.average is not None:
        rank.average.update_parameters(rank.module)
    cleared(rank)


def cleared(rank: Rank) -> None:
    """Clear every gradient, also those that no optimizer holds."""
    for optimizer in several(rank.optimizer):
        optimizer.zero_grad()
    rank.module.zero_grad()


def bare(module: nn.Module) -> nn.Module:
    """No wrapper: the loop reduces by itself."""
    return module


def averaged(rank: Rank) -> None:
    """Average every gradient over the ranks, as an averaging wrapper does."""
    for parameter in rank.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(rank.D)
            dist.all_reduce(parameter.grad, group=rank.dp_group)
