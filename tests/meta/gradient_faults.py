"""Loops whose gradient is wrong: written as people write them, wrong in one place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Rank
from equivtest.faults.pieces import (
    accumulated,
    averaged,
    backward,
    finish,
    reducing_last,
    right,
)

# -- what is accumulated


def last_never_fetched(rank: Rank) -> None:
    """``range(len(group) - 1)``."""
    for group in rank.groups:
        for k in range(len(group) - 1):
            with nullcontext() if k == len(group) - 2 else rank.model.no_sync():
                backward(rank, right(rank, group, group[k]))
        finish(rank)


def last_never_backward(rank: Rank) -> None:
    """The last microbatch is forwarded and its backward is left out; gradients averaged by hand."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            objective = right(rank, group, batch)
            if k < len(group) - 1:
                backward(rank, objective)
        averaged(rank)
        finish(rank)


def last_masked_out(rank: Rank) -> None:
    """A mask that is one position off multiplies the last microbatch's loss by 0."""
    for group in rank.groups:
        mask = [1.0] * (len(group) - 1) + [0.0]
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch) * mask[k])
        finish(rank)


def low_precision_accumulator(rank: Rank) -> None:
    """Sums in bfloat16 beside ``.grad``, reduced there and handed to the optimizer at the end."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        sums = [torch.zeros_like(p, dtype=torch.bfloat16) for p in parameters]
        for batch in group:
            backward(rank, right(rank, group, batch))
            for total, parameter in zip(sums, parameters, strict=True):
                if parameter.grad is not None:
                    total += parameter.grad
                parameter.grad = None
        for total, parameter in zip(sums, parameters, strict=True):
            dist.all_reduce(total, group=rank.dp_group)
            parameter.grad = total.to(parameter.dtype) / rank.D
        finish(rank)


# -- single tensors, after a right accumulation


@dataclass(frozen=True)
class Edited:
    """Something happens to the reduced gradient before the update."""

    edit: Callable[[dict[str, nn.Parameter]], None]

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            self.edit(dict(rank.module.named_parameters()))
            finish(rank)


@dataclass(frozen=True)
class Zeroed:
    name: str

    def __call__(self, parameters: dict[str, nn.Parameter]) -> None:
        grad = parameters[self.name].grad
        assert grad is not None
        grad.zero_()


@dataclass(frozen=True)
class Swapped:
    first: str
    second: str

    def __call__(self, parameters: dict[str, nn.Parameter]) -> None:
        one, other = parameters[self.first], parameters[self.second]
        one.grad, other.grad = other.grad, one.grad


@dataclass(frozen=True)
class Unreduced:
    """A wrapper that leaves one parameter out of the reduction."""

    name: str

    def __call__(self, module: nn.Module) -> nn.Module:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [self.name])
        return DistributedDataParallel(module)


@dataclass(frozen=True)
class WrongReplica:
    """One parameter takes rank 0's gradient everywhere: a broadcast, not a reduction."""

    name: str

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            grad = rank.module.get_parameter(self.name).grad
            assert grad is not None
            dist.broadcast(grad, 0, group=rank.dp_group)
            finish(rank)


# -- clip and precision
