"""Clip: when, and on what."""

from __future__ import annotations

from dataclasses import replace

from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Rank
from equivtest.faults.amp import own_scaler
from equivtest.faults.pieces import (
    accumulated,
    accumulated_alone,
    averaged,
    backward,
    finish,
    reducing_last,
    right,
    settle,
    updated,
)
from equivtest.faults.planting import Planted
from equivtest.faults.setting import accumulates, clips, clips_norm, replicates, scales
from equivtest.plan import Plan


def _clip(rank: Rank, scale: float = 1.0) -> None:
    """Clip as the experiment does, gradients that are multiplied by ``scale``."""
    if rank.clip_norm is not None:
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm * scale)
    if rank.clip_value is not None:
        clip_grad_value_(rank.module.parameters(), rank.clip_value * scale)


def per_microbatch(rank: Rank) -> None:
    """After each backward, of what is accumulated so far."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            if k < len(group) - 1:  # the last one: in finish
                _clip(rank, rank.scaler.get_scale() if rank.scaler else 1.0)
        finish(rank)


def before_unscale(rank: Rank) -> None:
    """No ``unscale_``: the clip sees gradients times the loss scale."""
    rank.scaler = own_scaler(rank)
    for group in rank.groups:
        accumulated(rank, group)
        _clip(rank)
        settle(rank, updated(rank))


def missing(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        settle(rank, updated(rank))


def before_sync(rank: Rank) -> None:
    """Each rank clips its own gradient, then they are averaged by hand."""
    for group in rank.groups:
        accumulated_alone(rank, group)
        _clip(rank, rank.scaler.get_scale() if rank.scaler else 1.0)
        averaged(rank)
        settle(rank, updated(rank))


def clipping(experiment: Experiment, plan: Plan) -> Experiment:
    """The experiment with a bound that its gradients exceed."""
    if experiment.clip_norm is not None or experiment.clip_value is not None:
        return experiment
    return replace(experiment, clip_norm=1e-2)


FAULTS = (
    Planted(
        "clip.per_microbatch",
        Cause.CLIP_PER_MICROBATCH,
        "lingua #59",
        per_microbatch,
        conditions=(clips, accumulates),
        shaped=clipping,
    ),
    Planted(
        "clip.before_unscale",
        Cause.CLIP_BEFORE_UNSCALE,
        "Lightning #9599",
        before_unscale,
        conditions=(clips_norm, scales),
        shaped=clipping,
    ),
    Planted(
        "clip.missing",
        Cause.CLIP_MISSING,
        "PyTorch AMP notes",
        missing,
        conditions=(clips,),
        shaped=clipping,
    ),
    Planted(
        "clip.before_sync",
        Cause.CLIP_BEFORE_SYNC,
        "Megatron-LM #1998",
        before_sync,
        conditions=(clips, replicates),
        shaped=clipping,
    ),
)
