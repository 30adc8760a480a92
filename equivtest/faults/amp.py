"""Loss scaling: by what the loss is multiplied, and how often its gradient is divided again.

torch's scaler works in every precision but float16 parameters: where the case has none, a loop
here brings its own, as a script does that was written for float16.
"""

from __future__ import annotations

from typing import Any

import torch

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import accumulated, backward, finish, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates, replicates, scales
from equivtest.loops import several

SCALE = 1024.0
"""What a loop's own scaler starts with."""


def own_scaler(rank: Rank, scale: float = SCALE) -> Any:
    """The rank's scaler, or one of the loop's own."""
    return rank.scaler or torch.amp.GradScaler(rank.device.type, init_scale=scale)


def scale_differs(rank: Rank) -> None:
    """A scale by rank, each a quarter of the next one's."""
    scale = own_scaler(rank).get_scale() * 4.0 ** (rank.dp_rank + 1 - rank.D)
    rank.scaler = torch.amp.GradScaler(rank.device.type, init_scale=scale)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def unscale_per_micro(rank: Rank) -> None:
    """``unscale_`` after each microbatch, of which torch allows one an update."""
    rank.scaler = own_scaler(rank)
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            if k < len(group) - 1:  # the last one: in finish
                for optimizer in several(rank.optimizer):
                    rank.scaler.unscale_(optimizer)
        finish(rank)


def unscale_per_micro_by_hand(rank: Rank) -> None:
    """A hand-written scaler: early microbatches are divided once for each that follows."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                (right(rank, group, batch) * SCALE).backward()
            _divide(rank, SCALE)
        finish(rank)


def double_unscale(rank: Rank) -> None:
    """By hand, and by the scaler again."""
    rank.scaler = own_scaler(rank)
    for group in rank.groups:
        accumulated(rank, group)
        _divide(rank, rank.scaler.get_scale())
        finish(rank)


def scale_changes_inside_group(rank: Rank) -> None:
    """The scale backs off after each microbatch, and one division is for all of them."""
    rank.scaler = own_scaler(rank)
    for group in rank.groups:
        for k, batch in enumerate(group):
            if k > 0:
                rank.scaler.update(new_scale=rank.scaler.get_scale() / 2)
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
        finish(rank)


def _divide(rank: Rank, scale: float) -> None:
    for parameter in rank.module.parameters():
        if parameter.grad is not None:
            parameter.grad.div_(scale)


def unscaled(setting: Setting) -> str:
    return "the case has a scaler, which raises" if setting.precision.scaled else ""


FAULTS = (
    Planted(
        "amp.scale_differs",
        Cause.SCALE_DIFFERS,
        "pytorch #136009",
        scale_differs,
        conditions=(replicates, scales),
    ),
    Planted(
        "amp.unscale_per_micro",
        Cause.UNSCALE_PER_MICRO,
        "accelerate #641",
        unscale_per_micro,
        conditions=(accumulates, scales),
        stops=True,
    ),
    Planted(
        "amp.unscale_per_micro/by_hand",
        Cause.UNSCALE_PER_MICRO,
        "accelerate #641",
        unscale_per_micro_by_hand,
        conditions=(accumulates, unscaled),
    ),
    Planted(
        "amp.double_unscale",
        Cause.DOUBLE_UNSCALE,
        "Relax #44",
        double_unscale,
        conditions=(scales,),
    ),
    Planted(
        "amp.scale_changes_inside_group",
        Cause.SCALE_CHANGES_INSIDE_GROUP,
        "PyTorch AMP notes",
        scale_changes_inside_group,
        conditions=(accumulates, scales),
    ),
)
