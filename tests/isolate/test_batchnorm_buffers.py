"""Running statistics of every rank, on real ranks, against arithmetic of one's own.

One BatchNorm feature and a learning rate of 0, so that the rows that it sees are the data. A
microbatch moves the mean to ``(1 - f) mean + f m`` and the variance likewise by the unbiased
variance, where f is the momentum, or 1 over the number of microbatches seen (``momentum=None``).
DDP broadcasts rank 0's buffers before the first forward of each group.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.arms import candidate
from equivtest.arms.case import case_of
from equivtest.loops import accumulate
from equivtest.pool import Shared, current_pool

PROBE = (0.0, 2.0, 4.0, 10.0)
DRAWN = (0.3, 1.9, -2.2, 7.1, 0.8, -0.6, 3.3, 2.5, -4.0, 1.2, 0.1, 5.5, -1.7, 2.9, 6.4, -3.1)

Buffers = tuple[float, float, int]
"""Running mean, running variance, batches tracked."""


def cubed(model: nn.Module, batch: Tensor) -> Loss:
    return Loss((model(batch) ** 3).sum(), count=len(batch))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def feature(rows: Sequence[float], momentum: float | None, **changes: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": lambda: nn.BatchNorm1d(1, momentum=momentum),
        "data": [torch.tensor([row], dtype=torch.float64) for row in rows],
        "loss": cubed,
        "count": len,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        "updates": 2,
    }
    return Experiment(**{**given, **changes})


def not_broadcast(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, broadcast_buffers=False)


def on_ranks(made: Experiment, plan: Plan, wrap: Any = None) -> list[list[Buffers]]:
    """The buffers of each rank after each update, of a real candidate."""
    shared = Shared(made)
    case = case_of(made, plan, precision="fp64", loop=None, wrap=wrap, device="cpu")
    case = replace(case, digest=shared.digest)
    traces = current_pool().run(candidate, shared, case, D=plan.D)
    return [[as_numbers(u.end.buffers) for u in trace.updates] for trace in traces]


def as_numbers(buffers: dict[str, Tensor]) -> Buffers:
    return (
        buffers["running_mean"].item(),
        buffers["running_var"].item(),
        int(buffers["num_batches_tracked"]),
    )


def by_hand(
    groups: Sequence[Sequence[Sequence[Sequence[float]]]], momentum: float | None, broadcast: bool
) -> list[list[Buffers]]:
    """The same in Python: ``groups`` holds rows by update, replica and microbatch."""
    now: list[Buffers] = [(0.0, 1.0, 0)] * len(groups[0])
    after: list[list[Buffers]] = [[] for _ in now]
    for group in groups:
        if broadcast:
            now = [now[0]] * len(now)
        for r, replica in enumerate(group):
            for rows in replica:
                now[r] = moved(now[r], rows, momentum)
            after[r].append(now[r])
    return after


def moved(before: Buffers, rows: Sequence[float], momentum: float | None) -> Buffers:
    mean, variance, tracked = before
    f = 1 / (tracked + 1) if momentum is None else momentum
    return (
        (1 - f) * mean + f * statistics.fmean(rows),
        (1 - f) * variance + f * statistics.variance(rows),
        tracked + 1,
    )


def groups_of(rows: Sequence[float], plan: Plan) -> list[list[list[Sequence[float]]]]:
    """The rows of two updates by replica and microbatch: contiguous, one after the other."""
    sizes = [plan.m] * plan.A if isinstance(plan.m, int) else list(plan.m)
    left = list(rows) * 2
    return [
        [[[left.pop(0) for _ in range(n)] for n in sizes] for _ in range(plan.D)] for _ in range(2)
    ]


# Probe B: rows 0, 2 | 4, 10 in two groups; its figures are worked out in tests/arms/test_replay.py.
PROBES: dict[str, tuple[Plan, Any, list[Buffers]]] = {
    "one batch": (Plan(4, 1, 1), None, [(3.0, 14.25, 2)]),
    "two accumulations": (Plan(2, 2, 1), None, [(4.6875, 11.9375, 4)]),
    "no broadcast": (Plan(2, 1, 2), not_broadcast, [(0.75, 1.75, 2), (5.25, 13.75, 2)]),
    "broadcast": (Plan(2, 1, 2), None, [(0.75, 1.75, 2), (3.75, 9.75, 2)]),
}


@pytest.mark.parametrize("probe", PROBES)
def test_the_probes_statistics_are_those_of_the_ranks_and_the_verdicts(probe: str) -> None:
    plan, wrap, expected = PROBES[probe]
    made = feature(PROBE, 0.5)
    last = [updates[-1] for updates in on_ranks(made, plan, wrap)]
    for (mean, variance, tracked), wanted in zip(last, expected, strict=True):
        assert (mean, variance) == pytest.approx(wanted[:2], rel=1e-12)
        assert tracked == wanted[2]
    verdict = check(made, plan, precision="fp64", wrap=wrap)
    assert verdict.status == ("equivalent" if probe == "one batch" else "explained")


def test_the_probes_gain_has_the_gradient_of_its_cut() -> None:
    # 2.0617 from the large batch and 0 from two halves (their cubes cancel): design's probe B.
    verdict = check(feature(PROBE, 0.5), Plan(2, 2, 1), precision="fp64")
    (gain,) = (row for row in verdict.rows if row.tensor == "weight" and row.update == 0)
    assert gain.split_distance == pytest.approx(1.0, abs=1e-14)  # all of it: 2.0617 of 2.0617
    assert "at `` " not in verdict.findings[0].text
    assert "first in the model's own forward (BatchNorm1d)" in verdict.findings[0].text


PLANS = (Plan(4, 2, 2), Plan(2, 2, 4), Plan((3, 2), 2, 3), Plan(5, 3, 1))


@pytest.mark.parametrize("wrap", [None, not_broadcast], ids=["broadcast", "not broadcast"])
@pytest.mark.parametrize("momentum", [0.1, None], ids=["exponential", "cumulative"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_drawn_rows_have_the_statistics_of_arithmetic(
    plan: Plan, momentum: float | None, wrap: Any
) -> None:
    rows = DRAWN[: plan.examples]
    found = on_ranks(feature(rows, momentum), plan, wrap)
    expected = by_hand(groups_of(rows, plan), momentum, broadcast=wrap is None)
    for mine, theirs in zip(found, expected, strict=True):
        for (mean, variance, tracked), wanted in zip(mine, theirs, strict=True):
            assert (mean, variance) == pytest.approx(wanted[:2], rel=1e-12, abs=1e-12)
            assert tracked == wanted[2]


# -- a loss that calls the model twice: the wrapper broadcasts before each call, or before neither


def both_ways(model: nn.Module, batch: Tensor) -> Loss:
    return Loss((model(batch) ** 3 + model(batch + batch**2)).sum(), count=len(batch))


@pytest.mark.parametrize("wrap", [None, not_broadcast], ids=["broadcast", "not broadcast"])
@pytest.mark.parametrize("plan", [Plan(4, 1, 4), Plan(4, 2, 2), Plan(2, 4, 2)], ids=str)
def test_two_forwards_of_a_microbatch_are_no_fault(plan: Plan, wrap: Any) -> None:
    made = feature(DRAWN, 0.1, loss=both_ways, optimizer=sgd, updates=3)
    verdict = check(made, plan, precision="fp64", wrap=wrap)
    assert verdict.causes == ("source.batchnorm",), verdict.explain()


def test_a_second_broadcast_brings_what_rank_0s_first_forward_left() -> None:
    # Rows 0, 2 | 4, 10 and then their row + row^2: 0, 6 | 20, 110, momentum 0.5, one update. Rank 0
    # holds 0.5 and then (0.5 + 3) / 2; rank 1's second forward starts from 0.5: (0.5 + 65) / 2.
    # Variances: (1 + 2) / 2 = 1.5, (1.5 + 18) / 2 = 9.75; (1.5 + 4050) / 2 = 2025.75.
    made = feature(PROBE, 0.5, loss=both_ways, updates=1)
    found = [updates[0] for updates in on_ranks(made, Plan(2, 1, 2))]
    assert found == [(1.75, 9.75, 2), (32.75, 2025.75, 2)]
    assert check(made, Plan(2, 1, 2), precision="fp64").causes == ("source.batchnorm",)


# -- planted


def moves_faster(rank: Rank) -> None:
    rank.module.momentum = 0.5
    accumulate(rank)


def looks_twice(rank: Rank) -> None:
    """A forward beside the plan's, without a gradient."""
    for group in rank.groups:
        with torch.no_grad():
            rank.module(group[0])
        rank.groups = [group]
        accumulate(rank)


def never_broadcasts(rank: Rank) -> None:
    """Puts its own buffers back after each broadcast: what no plan's forward makes of them."""
    own = {name: b.clone() for name, b in rank.module.named_buffers()}

    def put_back(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            for name, buffer in module.named_buffers():
                buffer.copy_(own[name])

    def keep(module: nn.Module, *_: Any) -> None:
        own.update({name: b.clone() for name, b in module.named_buffers()})

    rank.module.register_forward_pre_hook(put_back)
    rank.module.register_forward_hook(keep)
    accumulate(rank)


@pytest.mark.parametrize("loop", [moves_faster, looks_twice, never_broadcasts])
def test_statistics_beside_the_plan_are_a_fault(loop: Any) -> None:
    made = feature(DRAWN, 0.1)
    verdict = check(made, Plan(4, 2, 2), precision="fp64", loop=loop)
    assert verdict.status == "fault", verdict.explain()
    assert "differs.buffers" in verdict.causes


def test_a_wrapper_that_does_not_broadcast_is_right() -> None:
    verdict = check(feature(DRAWN, 0.1), Plan(4, 2, 2), precision="fp64", wrap=not_broadcast)
    assert verdict.causes == ("source.batchnorm",), verdict.explain()


def layers() -> Experiment:
    draw = torch.Generator().manual_seed(0)
    return feature(
        (),
        0.1,
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)),
        data=[torch.randn(5, generator=draw) for _ in range(32)],
        optimizer=sgd,
        scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**7),
    )


def with_kernels_of_its_own(rank: Rank) -> None:
    def rounds_otherwise(module: nn.Linear, given: tuple[Tensor], _: Tensor) -> Tensor:
        return (given[0].unsqueeze(1) * module.weight).sum(-1) + module.bias

    for module in rank.module.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(rounds_otherwise)
    accumulate(rank)


def with_kernels_of_its_own_and_faster(rank: Rank) -> None:
    rank.module[1].momentum = 0.2
    with_kernels_of_its_own(rank)


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_statistics_of_a_forward_that_rounds_otherwise_are_right(precision: str) -> None:
    verdict = check(layers(), Plan(4, 2, 2), precision=precision, loop=with_kernels_of_its_own)
    assert verdict.causes == ("source.batchnorm",), verdict.explain()
    wrong = with_kernels_of_its_own_and_faster
    verdict = check(layers(), Plan(4, 2, 2), precision=precision, loop=wrong)
    assert "differs.buffers" in verdict.causes, verdict.explain()
