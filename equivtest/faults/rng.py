"""Random numbers that repeat where they should differ."""

from __future__ import annotations

import torch

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import accumulated, finish
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, replicates

SEED = 42


def same_mask_across_replicas(rank: Rank) -> None:
    """One seed for a run that can be repeated, on every rank."""
    torch.manual_seed(SEED)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def draws(setting: Setting) -> str:
    return "" if setting.draws else "the forward draws no random numbers"


FAULTS = (
    Planted(
        "rng.same_mask_across_replicas",
        Cause.SAME_MASK_ACROSS_REPLICAS,
        "transformers #31412",
        same_mask_across_replicas,
        conditions=(replicates, draws),
    ),
)
