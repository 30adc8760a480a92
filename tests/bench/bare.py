"""The arms of one case in plain loops: no observing, no comparing, no recording.

What a person would write to run a large batch and its decomposition once, in the same warm process
group: build the model and its optimizer, and for every update forward, backward and update.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment
from equivtest.arms.build import deterministic, seed_everything
from equivtest.batches import Batches
from equivtest.plan import GroupLayout
from equivtest.pool import Seat

Groups = Sequence[GroupLayout]


def candidate(seat: Seat, experiment: Experiment, groups: Groups) -> None:
    """The decomposition on the real process group."""
    with deterministic():
        module = _built(experiment)
        model = DistributedDataParallel(module)
        optimizer = experiment.optimizer(module)
        batches = Batches(experiment, torch.float32)
        for group in groups:
            count = _counted(experiment, batches, group)
            own = group.ids[seat.rank]
            for k, ids in enumerate(own):
                with contextlib.nullcontext() if k == len(own) - 1 else model.no_sync():
                    loss = experiment.loss(model, batches(ids))
                    (loss.total / count * seat.size).backward()
            optimizer.step()
            optimizer.zero_grad()


def references(seat: Seat, experiment: Experiment, groups: Groups) -> None:
    """The large batch and the serial replay, one after the other in one process."""
    with deterministic():
        batches = Batches(experiment, torch.float32)
        _serially(experiment, batches, groups, [[group.flat] for group in groups])
        _serially(
            experiment, batches, groups, [[ids for r in group.ids for ids in r] for group in groups]
        )


def _serially(
    experiment: Experiment,
    batches: Batches,
    groups: Groups,
    microbatches: Sequence[Sequence[tuple[int, ...]]],
) -> None:
    module = _built(experiment)
    optimizer = experiment.optimizer(module)
    for group, parts in zip(groups, microbatches, strict=True):
        count = _counted(experiment, batches, group)
        for ids in parts:
            (experiment.loss(module, batches(ids)).total / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def _built(experiment: Experiment) -> nn.Module:
    seed_everything(experiment.seed)
    return experiment.model()


def _counted(experiment: Experiment, batches: Batches, group: GroupLayout) -> float:
    assert experiment.count is not None
    return float(experiment.count(batches(group.flat)))
