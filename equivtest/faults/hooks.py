"""Communication hooks: what the wrapper calls in place of its own average.

DistributedDataParallel reads the hooks' annotations: they cannot be postponed here.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Loss, LossResult, Rank
from equivtest.faults.pieces import accumulated, finish
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, replicates
from equivtest.plan import Plan

Hook = Callable[[ProcessGroup, GradBucket], Future[Tensor]]


def summing(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Adds up and returns: the wrapper leaves the division to its hook."""
    return _reduced(bucket.buffer(), group)


def dividing_twice(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Divides the bucket, and once more what comes back."""
    D = group.size()
    summed = _reduced(bucket.buffer().div_(D), group)
    return summed.then(lambda done: done.value() / D)


def in_half(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Compresses to float16, adds up there, and divides what comes back."""
    buffer = bucket.buffer()
    summed = _reduced(buffer.to(torch.float16), group)
    return summed.then(lambda done: buffer.copy_(done.value() / group.size()))


def _reduced(tensor: Tensor, group: ProcessGroup) -> Future[Tensor]:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return future


def in_bfloat16(group: ProcessGroup, bucket: GradBucket) -> Future[Tensor]:
    """Averages in bfloat16, as torch's own hook does, which is for NCCL alone."""
    buffer = bucket.buffer()
    summed = _reduced(buffer.to(torch.bfloat16).div_(group.size()), group)
    return summed.then(lambda done: buffer.copy_(done.value()))


def with_hook(hook: Hook, rank: Rank) -> None:
    rank.model.register_comm_hook(rank.dp_group, hook)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def missing_division(rank: Rank) -> None:
    with_hook(summing, rank)


def double_division(rank: Rank) -> None:
    with_hook(dividing_twice, rank)


def fp16_range(rank: Rank) -> None:
    with_hook(in_half, rank)


# -- where they show

HALF_MAX = 65504.0
"""The largest finite float16."""


def leaves_half(setting: Setting) -> str:
    """Some element of the sum over the replicas is beyond float16."""
    largest = max(float(gradient.abs().max()) for gradient in setting.gradients)
    if largest * setting.plan.D > HALF_MAX:
        return ""
    return f"the largest gradient is {largest:.2g}, and float16 holds its sum over replicas"


def large(experiment: Experiment, plan: Plan) -> Experiment:
    """The experiment with its loss so large that gradients leave float16's range."""
    return replace(experiment, loss=partial(_times, experiment.loss, 2.0**24))


def _times(loss: Callable[[Any, Any], LossResult], factor: float, model: Any, batch: Any) -> Any:
    given = loss(model, batch)
    if isinstance(given, Loss):
        return Loss(given.total * factor, given.count)
    return {name: Loss(term.total * factor, term.count) for name, term in given.items()}


def unscaled(setting: Setting) -> str:
    if setting.precision.scaled:
        return "a loss scale keeps gradients in float16's range, or skips the update"
    return ""


FAULTS = (
    Planted(
        "hook.missing_division",
        Cause.HOOK_MISSING_DIVISION,
        "pytorch #42400",
        missing_division,
        conditions=(replicates,),
    ),
    Planted(
        "hook.double_division",
        Cause.HOOK_DOUBLE_DIVISION,
        "pytorch #42400",
        double_division,
        conditions=(replicates,),
    ),
    Planted(
        "hook.fp16_range",
        Cause.HOOK_FP16_RANGE,
        "pytorch #57410",
        fp16_range,
        conditions=(replicates, unscaled, leaves_half),
        shaped=large,
    ),
)
