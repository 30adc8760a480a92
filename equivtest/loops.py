"""How to accumulate: the loop that runs where a case brings none, written to be read.

The order matters and is the same for every precision: backward for each microbatch (reducing only
with the last), unscale, clip, update attempted, scaler update, scheduler in its unit, averages,
clear.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from equivtest.experiment import Group, Loss, LossResult, Rank


def accumulate(rank: Rank) -> None:
    """Run every group of ``rank``: one attempted update a group, right in value for any plan."""
    optimizers = several(rank.optimizer)
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            # The forward must be inside no_sync as well: DDP decides there whether to reduce.
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                objective = normalised(loss, group) * rank.D  # DDP averages: times D makes a sum
                (rank.scaler.scale(objective) if rank.scaler else objective).backward()
            advance(rank, "microbatch")

        applied = update(rank, optimizers)
        advance(rank, "attempted")
        if applied:
            advance(rank, "applied")
            if rank.average is not None:
                rank.average.update_parameters(rank.module)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        rank.module.zero_grad(set_to_none=True)  # and what no optimizer holds: the clip sees it


def normalised(loss: LossResult, group: Group) -> Tensor:
    """The microbatch's share of the group's loss: its sum over the *group's* count, not its own."""
    if isinstance(loss, Loss):
        return loss.total / group.count
    shares = [term.total / group.count[name] for name, term in loss.items()]
    return torch.stack(shares).sum()


def update(rank: Rank, optimizers: list[Any]) -> bool:
    """Attempt the update; False if the scaler skipped it."""
    if rank.scaler is not None:
        for optimizer in optimizers:
            rank.scaler.unscale_(optimizer)
    if rank.clip_norm is not None:
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
    if rank.clip_value is not None:
        clip_grad_value_(rank.module.parameters(), rank.clip_value)
    if rank.scaler is None:
        for optimizer in optimizers:
            optimizer.step()
        return True
    scale = rank.scaler.get_scale()
    for optimizer in optimizers:
        rank.scaler.step(optimizer)
    rank.scaler.update()
    return bool(rank.scaler.get_scale() >= scale)  # it lowers the scale when it skips


def advance(rank: Rank, unit: str) -> None:
    """Move the schedulers if ``unit`` is what the experiment counts in."""
    if rank.scheduler is not None and rank.scheduler_unit == unit:
        for scheduler in several(rank.scheduler):
            scheduler.step()


def several(one_or_mapping: Any) -> list[Any]:
    """The values of a mapping, or the one object as a list."""
    if isinstance(one_or_mapping, Mapping):
        return list(one_or_mapping.values())
    return [one_or_mapping]
