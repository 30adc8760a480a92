"""Loaders of one's own that deal the examples otherwise than the plan.

They are written over ``rank.dataset`` with torch's ``DataLoader`` and ``DistributedSampler``, and
divide the gradient by the count of what they used: a fault of the data and none of the loss.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, DistributedSampler, Subset

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Loss, Rank
from equivtest.faults.pieces import backward, finish, no_sync, summed
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, replicates
from equivtest.plan import Plan

Dealer = Callable[[Rank, bool], tuple[Any, Any]]
"""The dataset and the sampler (or None) that a rank's loader has, shuffled or not."""


@dataclass(frozen=True)
class OwnLoader:
    """A training loop over a loader of its own, epoch after epoch.

    Attributes:
        dealer: what deals the examples.
        experiment: says how to collate, whether to shuffle, and what becomes of a last group.
        sets_epoch: tells the sampler each epoch's number, which its order depends on.
    """

    dealer: Dealer
    experiment: Experiment
    sets_epoch: bool = True

    def __call__(self, rank: Rank) -> None:
        m, A = len(rank.groups[0].examples[0]), len(rank.groups[0])
        dataset, sampler = self.dealer(rank, self.experiment.shuffle)
        collate = self.experiment.collate
        loader = DataLoader(dataset, batch_size=m, sampler=sampler, collate_fn=collate)
        for batches in itertools.islice(self._groups(loader, A), len(rank.groups)):
            train_on(rank, batches)
            finish(rank)

    def _groups(self, loader: DataLoader[Any], A: int) -> Iterator[list[Any]]:
        for epoch in itertools.count():
            if self.sets_epoch and isinstance(loader.sampler, DistributedSampler):
                loader.sampler.set_epoch(epoch)
            batches = iter(loader)
            while group := list(itertools.islice(batches, A)):
                if len(group) == A or self.experiment.last_group == "process":
                    yield group


def train_on(rank: Rank, batches: list[Any]) -> None:
    """The batches' gradient: summed over examples, divided in the end by the count of all ranks."""
    near_one = sum(map(len, rank.groups[0].examples))  # for a loss scale that fits means
    counted = 0.0
    for k, batch in enumerate(batches):
        with nullcontext() if k == len(batches) - 1 else no_sync(rank):
            with rank.autocast():
                loss = rank.loss(rank.model, stored(rank, batch))
            assert isinstance(loss, Loss), "the loss has no terms"
            backward(rank, loss.total / near_one)
        counted += float(loss.count)
    factor = near_one * rank.D / summed(rank, counted)
    for parameter in rank.module.parameters():
        if parameter.grad is not None:
            parameter.grad *= factor


def stored(rank: Rank, batch: Any) -> Any:
    """The batch on the rank's device, its floats in the parameters' dtype."""
    dtype = next(rank.module.parameters()).dtype

    def cast(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(rank.device, dtype if leaf.is_floating_point() else leaf.dtype)

    return tree_map(cast, batch)


# -- who gets which examples


def dealt(rank: Rank, shuffle: bool) -> tuple[Any, Any]:
    """Every D-th example; where they do not come out even, the first ones again at the end."""
    sampler: Any = DistributedSampler(
        rank.dataset,  # type: ignore[arg-type]
        num_replicas=rank.D,
        rank=rank.dp_rank,
        shuffle=shuffle,
    )
    return rank.dataset, sampler


def dealt_twice(rank: Rank, shuffle: bool) -> tuple[Any, Any]:
    """The rank's share of the data, and of that the sampler's."""
    own: Subset[Any] = Subset(
        rank.dataset,  # type: ignore[arg-type]
        range(rank.dp_rank, len(rank.dataset), rank.D),
    )
    return own, DistributedSampler(own, num_replicas=rank.D, rank=rank.dp_rank, shuffle=shuffle)


def not_dealt(rank: Rank, shuffle: bool) -> tuple[Any, Any]:
    """All of the data, on every rank, in one order."""
    alone: Any = DistributedSampler(
        rank.dataset,  # type: ignore[arg-type]
        num_replicas=1,
        rank=0,
        shuffle=shuffle,
    )
    return rank.dataset, alone


def right(experiment: Experiment) -> OwnLoader:
    """Nothing is wrong where the examples come out even over the replicas."""
    return OwnLoader(dealt, experiment)


def double_sharding(experiment: Experiment) -> OwnLoader:
    return OwnLoader(dealt_twice, experiment)


def not_sharded(experiment: Experiment) -> OwnLoader:
    return OwnLoader(not_dealt, experiment)


def epoch_not_set(experiment: Experiment) -> OwnLoader:
    return OwnLoader(dealt, experiment, sets_epoch=False)


# -- experiments in which they show


def uneven(experiment: Experiment, plan: Plan) -> Experiment:
    """One epoch, at the end of which the replicas' shares are not equal."""
    n = min(len(experiment.data), 2 * plan.examples) - 1
    return replace(
        experiment, data=_first(experiment, n), last_group="process", updates=_groups(n, plan)
    )


def two_epochs(experiment: Experiment, plan: Plan) -> Experiment:
    """Two epochs of full groups, each shuffled."""
    n = min(len(experiment.data) // plan.examples, 2) * plan.examples
    return replace(
        experiment, data=_first(experiment, n), shuffle=True, updates=2 * _groups(n, plan)
    )


def _first(experiment: Experiment, n: int) -> list[Any]:
    return [experiment.data[i] for i in range(n)]


def _groups(n: int, plan: Plan) -> int:
    return -(-n // plan.examples)


# -- where they show


def equal_sizes(setting: Setting) -> str:
    if isinstance(setting.plan.m, tuple):
        return "a loader's microbatches are of one size"
    return ""


def one_term(setting: Setting) -> str:
    """Of a loss that is asked for once."""
    terms = len(setting.counted) // len(setting.groups)
    return "" if terms == 1 else "it divides by one count, and the loss has terms with their own"


def pads(setting: Setting) -> str:
    """The sampler's padding is reached."""
    n, plan = len(setting.experiment.data), setting.plan
    if n % plan.D == 0:
        return "the examples come out even over the replicas: nothing is padded"
    if setting.experiment.last_group != "process":
        return "the last group, which would be padded, is dropped"
    if setting.experiment.updates < _groups(n, plan):
        return "the updates end before the data does"
    return ""


def shuffles(setting: Setting) -> str:
    return "" if setting.experiment.shuffle else "the experiment does not shuffle"


def second_epoch(setting: Setting) -> str:
    epochs = {group.epoch for group in setting.groups}
    return "" if len(epochs) > 1 else "the updates end before the first epoch does"


FAULTS = (
    Planted(
        "data.padding_duplicates",
        Cause.PADDING_DUPLICATES,
        "pytorch #25162",
        made=right,
        conditions=(replicates, equal_sizes, pads, one_term),
        shaped=uneven,
    ),
    Planted(
        "data.double_sharding",
        Cause.DOUBLE_SHARDING,
        "accelerate #3520",
        made=double_sharding,
        conditions=(replicates, equal_sizes, one_term),
    ),
    Planted(
        "data.not_sharded",
        Cause.NOT_SHARDED,
        "datasets #5360",
        made=not_sharded,
        conditions=(replicates, equal_sizes, one_term),
    ),
    Planted(
        "data.epoch_not_set",
        Cause.EPOCH_NOT_SET,
        "pytorch #31771",
        made=epoch_not_set,
        conditions=(shuffles, second_epoch, equal_sizes, one_term),
        shaped=two_epochs,
    ),
)
