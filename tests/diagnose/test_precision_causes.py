"""Sums in a lower dtype are told from any other fault by the bits that they leave."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diagnose.ragged import PLAN, ragged
from faults.probes import readout
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from equivtest import Plan, Rank, check
from equivtest.faults.pieces import averaged, backward, finish, reducing_last, right

ACCUMULATOR = "prec.low_precision_accumulator"
REDUCE = "prec.low_precision_reduce"
RANGE = "hook.fp16_range"


@dataclass(frozen=True)
class Accumulated:
    """Sums in ``dtype`` beside ``.grad``; reduced there, or in the gradient's own dtype."""

    dtype: torch.dtype
    reduced: bool = False
    cast: bool = False
    factor: float = 1.0

    def __call__(self, rank: Rank) -> None:
        parameters = list(rank.module.parameters())
        for group in rank.groups:
            sums = [torch.zeros_like(p, dtype=self.dtype) for p in parameters]
            for batch in group:
                with rank.model.no_sync():
                    backward(rank, right(rank, group, batch) * self.factor)
                for total, parameter in zip(sums, parameters, strict=True):
                    assert parameter.grad is not None
                    total += parameter.grad.to(self.dtype) if self.cast else parameter.grad
                    parameter.grad = None
            for total, parameter in zip(sums, parameters, strict=True):
                if self.reduced:
                    dist.all_reduce(total, group=rank.dp_group)
                parameter.grad = total.to(parameter.dtype) / (rank.D if self.reduced else 1)
            if not self.reduced:
                averaged(rank)
            finish(rank)


@dataclass(frozen=True)
class Reduced:
    """Averaged by hand in ``dtype``, divided before the cast, before the sum or after it."""

    dtype: torch.dtype
    divided: str
    factor: float = 1.0

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                with rank.model.no_sync():
                    backward(rank, right(rank, group, batch) * self.factor)
            for parameter in rank.module.parameters():
                assert parameter.grad is not None
                parameter.grad = self.average(rank, parameter.grad)
            finish(rank)

    def average(self, rank: Rank, gradient: Tensor) -> Tensor:
        low = (gradient / rank.D if self.divided == "first" else gradient).to(self.dtype)
        low = low / rank.D if self.divided == "low" else low
        dist.all_reduce(low, group=rank.dp_group)
        low = low / rank.D if self.divided == "after" else low
        return low.to(gradient.dtype) / (rank.D if self.divided == "last" else 1)


def compressed(module: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(None, fp16_compress_hook)  # type: ignore[arg-type]
    return wrapper


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("loop", "cause", "precision", "plan"),
    [
        (Accumulated(BF16), ACCUMULATOR, "fp32", PLAN),
        (Accumulated(BF16, cast=True), ACCUMULATOR, "fp64", PLAN),
        (Accumulated(BF16, reduced=True), ACCUMULATOR, "bf16-mixed", PLAN),
        (Accumulated(FP16), ACCUMULATOR, "fp32", Plan(4, 3, 1)),
        (Accumulated(FP32), ACCUMULATOR, "fp64", PLAN),
        (Reduced(BF16, "first"), REDUCE, "fp32", PLAN),
        (Reduced(BF16, "low"), REDUCE, "fp32", Plan(2, 2, 3)),
        (Reduced(BF16, "after"), REDUCE, "fp16-mixed", PLAN),
        (Reduced(FP16, "last"), REDUCE, "fp32", Plan(1, 3, 4)),
        (Reduced(FP32, "low"), REDUCE, "fp64", Plan(1, 4, 3)),
    ],
    ids=str,
)
def test_a_low_sum_is_named(loop: Any, cause: str, precision: str, plan: Plan) -> None:
    verdict = check(ragged(), plan, precision=precision, loop=loop)
    assert (verdict.status, verdict.causes) == ("fault", (cause,)), verdict.explain()
    assert verdict.margin > 1


def test_a_hook_that_compresses_is_a_low_reduction() -> None:
    assert check(ragged(), PLAN, wrap=compressed).causes == (REDUCE,)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    ("loop", "cause"),
    [
        (Accumulated(BF16, factor=1 / 3), ACCUMULATOR),
        (Reduced(BF16, "first", factor=1 / 3), REDUCE),
    ],
    ids=str,
)
def test_what_the_sum_loses_is_taken_out_before_another_fault_is_looked_for(
    loop: Any, cause: str, precision: str
) -> None:
    """Divided by A = 3 once more as well: both are named, and nothing else."""
    verdict = check(ragged(), PLAN, precision=precision, loop=loop)
    assert verdict.causes == (cause, "norm.double_accum_division"), verdict.explain()


def only_last(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            rank.optimizer.zero_grad()
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
        finish(rank)


def clipped_early_and_divided_twice(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch) / len(group))
            clip_grad_norm_(rank.module.parameters(), 0.01)
        finish(rank)


def test_cleared_microbatches_are_left_out_of_the_sum() -> None:
    verdict = check(ragged(), PLAN, loop=only_last, wrap=compressed)
    assert verdict.causes == (REDUCE, "accum.only_last"), verdict.explain()


def test_three_faults_are_three_names() -> None:
    experiment = ragged(clip_norm=0.01)
    verdict = check(experiment, PLAN, loop=clipped_early_and_divided_twice, wrap=compressed)
    wanted = {REDUCE, "clip.per_microbatch", "norm.double_accum_division"}
    assert set(verdict.causes) == wanted, verdict.explain()


def in_its_own_dtype(rank: Rank) -> None:
    Accumulated(next(rank.module.parameters()).dtype)(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "bf16"])
def test_sums_in_the_dtype_of_the_parameters_are_right(precision: str) -> None:
    verdict = check(ragged(), PLAN, precision=precision, loop=in_its_own_dtype)
    assert not [c for c in verdict.causes if c.startswith("prec")], verdict.explain()
    assert verdict.status in ("equivalent", "explained")


def test_another_fault_is_no_low_sum() -> None:
    assert not [c for c in check(ragged(), PLAN, loop=only_last).causes if c.startswith("prec")]


# -- the toys of the field: exact numbers


def first_gradient(loop: Callable[[Rank], None], gradients: list[float], plan: Plan) -> Any:
    count = [1.0] * len(gradients)
    return check(
        readout(count, [g * len(gradients) for g in gradients]), plan, precision="fp32", loop=loop
    )


def test_256_and_1_are_256_in_bfloat16() -> None:
    verdict = first_gradient(Accumulated(BF16), [256.0, 1.0], Plan(1, 2, 1))
    assert verdict.causes == (ACCUMULATOR,), verdict.explain()
    row = next(row for row in verdict.rows if row.tensor == "s")
    assert row.norm == 256.0
