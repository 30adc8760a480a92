"""Precisions that are not the case's: autocast left out, low sums, overflow that nothing skips."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from equivtest.causes import Cause
from equivtest.experiment import Group, Rank
from equivtest.faults.hooks import in_bfloat16, with_hook
from equivtest.faults.pieces import (
    accumulated_alone,
    backward,
    finish,
    no_sync,
    reducing_last,
    right,
)
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates, replicates
from equivtest.loops import normalised

FIXED_SCALE = 2.0**40
"""No float16 gradient holds it."""


def autocast_left_out(rank: Rank) -> None:
    """The forward runs as the model is stored."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                loss = rank.loss(rank.model, batch)
                backward(rank, normalised(loss, group) * rank.D)
        finish(rank)


def low_accumulator(rank: Rank) -> None:
    """Sums in bfloat16 beside ``.grad``, handed to the optimizer at the end."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters]
        for batch in group:
            with no_sync(rank):
                backward(rank, right(rank, group, batch))
            for total, parameter in zip(sums, parameters, strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
                parameter.grad = None
        for total, parameter in zip(sums, parameters, strict=True):
            parameter.grad = total.to(parameter.dtype)
            dist.all_reduce(parameter.grad, group=rank.dp_group)
            parameter.grad /= rank.D
        finish(rank)


def low_reduce(rank: Rank) -> None:
    """Reduced by hand, in bfloat16 to halve what is sent."""
    for group in rank.groups:
        accumulated_alone(rank, group)
        for parameter in rank.module.parameters():
            if parameter.grad is not None:
                sent = (parameter.grad / rank.D).bfloat16()
                dist.all_reduce(sent, group=rank.dp_group)
                parameter.grad.copy_(sent)
        finish(rank)


def low_reduce_by_hook(rank: Rank) -> None:
    """Reduced in bfloat16 by a communication hook."""
    with_hook(in_bfloat16, rank)


def nonfinite(rank: Rank) -> None:
    """Losses over the deviation of those before, which is NaN of a single one; nothing skips it."""
    rank.scaler = None
    for group in rank.groups:
        weigh = over_deviation()
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                weigh(right(rank, group, batch)).backward()
        finish(rank)


def over_deviation() -> Callable[[Tensor], Tensor]:
    """A function that divides each loss by the deviation of those it has seen, itself included."""
    seen: list[Tensor] = []

    def weigh(objective: Tensor) -> Tensor:
        seen.append(objective.detach())
        squares = (torch.stack(seen) - torch.stack(seen).mean()).square()
        return objective / (squares.sum() / (len(seen) - 1)).sqrt()

    return weigh


def nonfinite_by_scale(rank: Rank) -> None:
    """A fixed loss scale, too large, and no look at what came of it."""
    rank.scaler = None
    for group in rank.groups:
        by_fixed_scale(rank, group)
        finish(rank)


def by_fixed_scale(rank: Rank, group: Group) -> None:
    """The group's gradient under a loss scale by hand that a float16 gradient cannot hold."""
    for k, batch in enumerate(group):
        with reducing_last(rank, group, k):
            (right(rank, group, batch) * FIXED_SCALE).backward()
    for parameter in rank.module.parameters():
        if parameter.grad is not None:
            parameter.grad /= FIXED_SCALE


# -- where they show


def casts(setting: Setting) -> str:
    if setting.precision.autocast is None:
        return f"{setting.precision.name} has no autocast"
    return ""


def promises_more(setting: Setting) -> str:
    """Gradients have more bits than bfloat16."""
    if setting.precision.parameters in (torch.bfloat16, torch.float16):
        return f"{setting.precision.name} promises no better sums"
    return ""


def halves(setting: Setting) -> str:
    """Gradients pass through float16, in which the fixed scale overflows."""
    if setting.precision.name != "fp16-mixed":
        return "only float16 gradients overflow here (fp16-mixed)"
    return ""


FAULTS = (
    Planted(
        "prec.not_applied",
        Cause.NOT_APPLIED,
        "",
        autocast_left_out,
        conditions=(casts,),
    ),
    Planted(
        "prec.nonfinite",
        Cause.NONFINITE,
        "nanochat #618",
        nonfinite,
    ),
    Planted(
        "prec.nonfinite/fixed_scale",
        Cause.NONFINITE,
        "nanochat #618",
        nonfinite_by_scale,
        conditions=(halves,),
    ),
    Planted(
        "prec.low_precision_accumulator",
        Cause.LOW_PRECISION_ACCUMULATOR,
        "DeepSpeed #2768",
        low_accumulator,
        conditions=(accumulates, promises_more),
    ),
    Planted(
        "prec.low_precision_reduce",
        Cause.LOW_PRECISION_REDUCE,
        "pytorch #106395",
        low_reduce,
        conditions=(replicates, promises_more),
    ),
    Planted(
        "prec.low_precision_reduce/hook",
        Cause.LOW_PRECISION_REDUCE,
        "pytorch #106395",
        low_reduce_by_hook,
        conditions=(replicates, promises_more),
    ),
)
