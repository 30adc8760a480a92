"""SyncBatchNorm: statistics that span the replicas, on real ranks.

Torch's own runs on GPUs alone. Here its arithmetic is written with collectives that have a
gradient, over gloo, and the loop averages gradients by hand, for DistributedDataParallel refuses
the layer on a CPU; torch's own is run where there is a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from normalised import IMAGE, an_experiment, dense, image
from torch import Tensor, nn

from equivtest import Plan, Rank, check

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()),
    reason="SyncBatchNorm refuses CPU input, and there is no CUDA device",
)


class Summed(torch.autograd.Function):
    """The sum over replicas; what each gives to the loss reaches all, so gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.contiguous().clone()
        dist.all_reduce(total)
        return total


class OverGloo(nn.SyncBatchNorm):
    """``y = (x - mean) / sqrt(variance + eps)`` by sums over all replicas."""

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and dist.is_initialized()):
            return super().forward(x)  # the reference arms: one process
        count = Summed.apply(torch.tensor(float(len(x)), dtype=x.dtype))
        mean = Summed.apply(x.sum(0)) / count
        variance = Summed.apply((x - mean).square().sum(0)) / count
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return (x - mean) / torch.sqrt(variance + self.eps) * self.weight + self.bias


def by_hand(rank: Rank, factor: float = 1.0) -> None:
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for batch in group:
            total = rank.loss(rank.module, batch).total
            (total / group.count * rank.D * (factor if rank.dp_rank else 1.0)).backward()
        for parameter in rank.module.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= rank.D
        rank.optimizer.step()


def weighs_a_replica_more(rank: Rank) -> None:
    by_hand(rank, factor=1.01)


made = an_experiment(lambda: dense(OverGloo(8)))


def checked(plan: Plan, precision: str, loop: Any = by_hand) -> Any:
    return check(made, plan, precision=precision, loop=loop, wrap=lambda module: module)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("plan", [Plan(8, 1, 2), Plan(1, 1, 4)], ids=str)
def test_replicas_that_share_statistics_are_the_large_batch(plan: Plan, precision: str) -> None:
    verdict = checked(plan, precision)
    assert verdict.status == "equivalent", verdict.explain()


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("plan", [Plan(4, 2, 2), Plan(1, 4, 4), Plan((3, 5), 2, 2)], ids=str)
def test_accumulations_still_have_statistics_of_their_own(plan: Plan, precision: str) -> None:
    verdict = checked(plan, precision)
    assert verdict.status == "explained", verdict.explain()
    assert verdict.causes == ("source.batchnorm",)
    assert verdict.sources["source.batchnorm"] >= 0.9999


@pytest.mark.parametrize("plan", [Plan(8, 1, 2), Plan(4, 2, 2)], ids=str)
def test_a_replica_of_another_weight_is_a_fault(plan: Plan) -> None:
    verdict = checked(plan, "fp64", weighs_a_replica_more)
    assert verdict.status == "fault", verdict.explain()
    assert "differs.gradient" in verdict.causes


@needs_gpu
@pytest.mark.parametrize("A", [1, 2])
def test_torchs_own_spans_replicas_on_a_gpu(A: int) -> None:
    own = an_experiment(lambda: image(nn.SyncBatchNorm(4)), IMAGE)
    verdict = check(own, Plan(4, A, 2), precision="fp64", device="cuda", share_gpus=True)
    assert verdict.status == ("equivalent" if A == 1 else "explained"), verdict.explain()
