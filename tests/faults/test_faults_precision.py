"""Low sums, overflow, and autocast left out: the numbers of the field's toys."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from faults.probes import gradients, linear, traces
from torch import nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.faults import planted, precision
from equivtest.loops import accumulate

Loop = Callable[[Rank], None]


@pytest.mark.parametrize(
    ("loop", "total"), [(accumulate, 257.0), (precision.low_accumulator, 256.0)]
)
def test_one_is_lost_beside_256_in_bfloat16(loop: Loop, total: float) -> None:
    """512 and 2 over two microbatches: 256 + 1."""
    (held,) = gradients(linear([512.0], [2.0]), Plan(1, 2, 1), loop)
    assert held["v"] == [total]


@pytest.mark.parametrize(("loop", "total"), [(accumulate, 1.0), (precision.low_accumulator, 0.5)])
def test_512_parts_of_1_512_stop_at_a_half_in_bfloat16(loop: Loop, total: float) -> None:
    """Halfway between 0.5 and the next number, rounded to even."""
    (held,) = gradients(linear(*([[1.0]] * 512)), Plan(1, 512, 1), loop)
    assert held["v"] == [total]


@pytest.mark.parametrize(
    ("loop", "total"),
    [
        (accumulate, 257.0),
        (precision.low_reduce, 256.0),
        (precision.low_reduce_by_hook, 256.0),
    ],
    ids=["right", "by hand", "by hook"],
)
def test_a_reduction_in_bfloat16_loses_as_much(loop: Loop, total: float) -> None:
    for held in gradients(linear([512.0], [2.0]), Plan(1, 1, 2), loop):
        assert held["v"] == [total]


def test_one_microbatch_without_a_number_takes_it_from_all() -> None:
    for held in gradients(
        linear([1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]), Plan(1, 2, 2), precision.nonfinite
    ):
        assert all(math.isnan(value) for value in held["v"])


def test_a_fixed_scale_overflows_in_float16_and_is_applied() -> None:
    (trace,) = traces(
        linear([1.0, 2.0]), Plan(1, 1, 1), precision.nonfinite_by_scale, in_precision="fp16-mixed"
    )
    (update,) = trace.updates
    assert update.applied
    assert not torch.isfinite(update.after["v"]).any()


def rows(model: nn.Module, batch: torch.Tensor) -> Loss:
    return Loss(model(batch).square().sum(), count=len(batch))


MATRIX = Experiment(
    model=lambda: nn.Linear(3, 2),
    data=[torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(4)],
    loss=rows,
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    updates=1,
)


@pytest.mark.parametrize(
    ("loop", "low"), [(accumulate, True), (precision.autocast_left_out, False)]
)
def test_without_autocast_no_bfloat16_is_seen(loop: Loop, low: bool) -> None:
    (trace,) = traces(MATRIX, Plan(2, 2, 1), loop, in_precision="bf16-mixed")
    dtypes = {dtype for m in trace.updates[0].microbatches for dtype in m.dtypes}
    assert ("torch.bfloat16" in dtypes) is low


@pytest.mark.parametrize(
    ("name", "in_precision", "reason"),
    [
        ("prec.not_applied", "fp64", "fp64 has no autocast"),
        ("prec.not_applied", "bf16-mixed", ""),
        ("prec.nonfinite/fixed_scale", "fp32", "only float16 gradients overflow here"),
        ("prec.low_precision_accumulator", "bf16", "bf16 promises no better sums"),
        ("prec.low_precision_accumulator", "bf16-mixed", ""),
        ("prec.low_precision_reduce", "fp64", "D is 1: there is nothing to reduce"),
    ],
)
def test_where_it_cannot_show_it_says_why(name: str, in_precision: str, reason: str) -> None:
    told = planted(name).applies(MATRIX, Plan(2, 2, 1), in_precision)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)
