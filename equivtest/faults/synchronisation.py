"""Synchronisation: which backward reduces over the replicas, and what it reduces."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest.causes import Cause
from equivtest.experiment import Rank
from equivtest.faults.pieces import accumulated, backward, finish, no_sync, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import accumulates, replicates
from equivtest.loops import normalised, several


def inverted_boundary(rank: Rank) -> None:
    """Reduces with the first microbatch and suppresses it with the others."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with nullcontext() if k == 0 else no_sync(rank):
                backward(rank, right(rank, group, batch))
        finish(rank)


def flag_after_forward(rank: Rank) -> None:
    """The wrapper's flag is set between forward and backward, and it is read in the forward."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            objective = right(rank, group, batch)
            rank.model.require_backward_grad_sync = k == len(group) - 1
            backward(rank, objective)
        finish(rank)


def never(rank: Rank) -> None:
    """The forward goes through the inner module."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.module, batch)
            backward(rank, normalised(loss, group) * rank.D)
        finish(rank)


def always_suppressed(rank: Rank) -> None:
    """Every microbatch inside ``no_sync``, the last one too."""
    for group in rank.groups:
        with no_sync(rank):
            for batch in group:
                backward(rank, right(rank, group, batch))
        finish(rank)


def param_replaced(rank: Rank) -> None:
    """The first parameter is assigned anew once the model is wrapped."""
    named = list(rank.module.named_parameters(remove_duplicate=False))
    homes = Counter(id(parameter) for _, parameter in named)
    name, old = next((n, p) for n, p in named if p.requires_grad and homes[id(p)] == 1)
    path, _, leaf = name.rpartition(".")
    new = nn.Parameter(old.detach().clone())
    setattr(rank.module.get_submodule(path), leaf, new)
    for optimizer in several(rank.optimizer):
        for held in optimizer.param_groups:
            held["params"] = [new if p is old else p for p in held["params"]]
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def finding_unused(module: nn.Module) -> nn.Module:
    """The wrapper that goes on without the parameter that is gone."""
    return DistributedDataParallel(module, find_unused_parameters=True)


def static_graph(module: nn.Module) -> nn.Module:
    """The wrapper told that every iteration reduces alike."""
    return DistributedDataParallel(module, static_graph=True)


def extra(rank: Rank) -> None:
    """``no_sync`` around the backward alone: every microbatch reduces."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            objective = right(rank, group, batch)
            with reducing_last(rank, group, k):
                backward(rank, objective)
        finish(rank)


FAULTS = (
    Planted(
        "sync.inverted_boundary",
        Cause.INVERTED_BOUNDARY,
        "FunASR #3472",
        inverted_boundary,
        conditions=(accumulates, replicates),
    ),
    Planted(
        "sync.flag_after_forward",
        Cause.FLAG_AFTER_FORWARD,
        "build-nanogpt #30",
        flag_after_forward,
        conditions=(accumulates, replicates),
    ),
    Planted(
        "sync.never",
        Cause.NEVER_SYNCHRONISED,
        "minimind #853",
        never,
        conditions=(replicates,),
    ),
    Planted(
        "sync.never/no_sync",
        Cause.NEVER_SYNCHRONISED,
        "minimind #853",
        always_suppressed,
        conditions=(replicates,),
    ),
    Planted(
        "sync.param_replaced",
        Cause.PARAM_REPLACED,
        "pytorch #104336",
        param_replaced,
        finding_unused,
        conditions=(replicates,),
    ),
    Planted(
        "sync.static_graph",
        Cause.STATIC_GRAPH,
        "pytorch #187732",
        wrap=static_graph,
        conditions=(accumulates,),
    ),
    Planted(
        "sync.extra",
        Cause.EXTRA,
        "accelerate #1726",
        extra,
        conditions=(accumulates, replicates),
    ),
)
