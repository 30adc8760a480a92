"""The probes that name a fault by a number: exact values, read from real process groups.

T: D=2, A=3, supervised counts 1, 3, 2 | 2, 6, 1, N=15, loss of an element ``g s + w[r, k]``. ``s``
is shared by all, ``w`` has one coordinate a microbatch and so reads out the weight of each.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from meta import gradient_faults as g
from meta import update_faults as u
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.arms import Case, candidate
from equivtest.arms.case import groups_of
from equivtest.loops import accumulate
from equivtest.observe.trace import Trace
from equivtest.pool import Shared, current_pool
from equivtest.precision import precision


class Readout(nn.Module):
    """A shared scalar, and a coordinate for each microbatch of each replica."""

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))
        self.w = nn.Parameter(torch.zeros(microbatches))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss by example, summed over its elements."""
        return batch["count"] * (batch["g"] * self.s + self.w[batch["where"]])


def per_element(model: Any, batch: dict[str, Tensor]) -> Loss:
    return Loss(total=model(batch).sum(), count=batch["count"].sum())


def readout(counts: list[float], gradients: list[float], **more: Any) -> Experiment:
    """One example a microbatch: its count of supervised elements and their gradient."""
    return Experiment(
        model=lambda: Readout(len(counts)),
        data=[
            {"count": torch.tensor(n), "g": torch.tensor(x), "where": torch.tensor(i)}
            for i, (n, x) in enumerate(zip(counts, gradients, strict=True))
        ],
        loss=per_element,
        count=lambda batch: batch["count"].sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        updates=1,
        **more,
    )


PROBE_T = readout([1.0, 3.0, 2.0, 2.0, 6.0, 1.0], [8.0, 2.0, -1.0, 1.0, -1.0, 4.0])
PLAN_T = Plan(1, 3, 2)
PROBE_T0 = readout([1.0, 3.0, 2.0], [8.0, 2.0, -1.0])
PLAN_T0 = Plan(1, 3, 1)


def traces(
    experiment: Experiment, plan: Plan, loop: Callable[[Rank], None], wrap: Any = None
) -> list[Trace]:
    """What each rank left, in float64."""
    shared = Shared(experiment)
    groups = groups_of(experiment, plan)
    case = Case(plan, precision("fp64"), groups, loop, wrap, "cpu", shared.digest)
    return current_pool().run(candidate, shared, case, D=plan.D)


def gradients(
    experiment: Experiment, plan: Plan, loop: Callable[[Rank], None], wrap: Any = None
) -> list[dict[str, list[float]]]:
    """The first update's gradient on each rank, flat."""
    firsts = [trace.updates[0].gradient for trace in traces(experiment, plan, loop, wrap)]
    return [
        {name: held.reshape(-1).tolist() for name, held in first.items() if held is not None}
        for first in firsts
    ]


FIFTEENTHS = {
    accumulate: (0.8, [1, 3, 2, 2, 6, 1]),
    # 1/A of the means, averaged over D: each microbatch counts 15/6
    g.mean_of_means: (13 / 6, [2.5] * 6),
    # S/6 and S/9, averaged
    g.local_denominator: (1.0, [1.25, 3.75, 2.5, 5 / 3, 5.0, 5 / 6]),
    g.missing_world_size: (0.4, [0.5, 1.5, 1, 1, 3, 0.5]),
    g.double_division: (0.8 / 3, [1 / 3, 1, 2 / 3, 2 / 3, 2, 1 / 3]),
    g.only_last: (2 / 15, [0, 0, 2, 0, 0, 1]),
}
"""Loop: ds, and w in units of 1/15. The numbers of the decimal notation: 0.8, 2.1667, 1.0, 0.4,
0.2667, 0.1333."""


@pytest.mark.parametrize("loop", FIFTEENTHS, ids=lambda loop: loop.__name__)
def test_probe_t_gives_each_fault_its_number(loop: Callable[[Rank], None]) -> None:
    ds, weights = FIFTEENTHS[loop]
    for held in gradients(PROBE_T, PLAN_T, loop):
        assert held["s"] == pytest.approx([ds], abs=1e-14)
        assert held["w"] == pytest.approx([w / 15 for w in weights], abs=1e-14)


@pytest.mark.parametrize("loop", FIFTEENTHS, ids=lambda loop: loop.__name__)
def test_the_verdict_finds_the_weights_that_probe_t_reads_out(
    loop: Callable[[Rank], None],
) -> None:
    verdict = check(PROBE_T, PLAN_T, precision="fp64", loop=loop)
    if loop is accumulate:
        assert verdict.status == "equivalent"
        return
    assert verdict.status == "fault"
    right, planted = FIFTEENTHS[accumulate][1], FIFTEENTHS[loop][1]
    found = verdict.weights.sort_values(["replica", "microbatch"])["found"].tolist()
    assert found == pytest.approx([w / r for w, r in zip(planted, right, strict=True)], abs=1e-9)


def test_ranks_that_never_synchronise_hold_1_6_and_0() -> None:
    first, second = gradients(PROBE_T, PLAN_T, g.never_synchronised)
    assert first["s"] == pytest.approx([1.6], abs=1e-14)
    assert second["s"] == pytest.approx([0.0], abs=1e-14)
    assert first["w"] == pytest.approx([w / 15 for w in (2, 6, 4, 0, 0, 0)], abs=1e-14)
    assert second["w"] == pytest.approx([w / 15 for w in (0, 0, 0, 4, 12, 2)], abs=1e-14)
    verdict = check(PROBE_T, PLAN_T, precision="fp64", loop=g.never_synchronised)
    assert verdict.status == "fault"
    assert "differs.ranks" in verdict.causes


def test_an_inverted_boundary_leaves_1_2_and_0_4() -> None:
    first, second = gradients(PROBE_T, PLAN_T, g.inverted_boundary)
    assert first["s"] == pytest.approx([1.2], abs=1e-14)
    assert second["s"] == pytest.approx([0.4], abs=1e-14)
    assert first["w"] == pytest.approx([w / 15 for w in (1, 6, 4, 2, 0, 0)], abs=1e-14)
    assert second["w"] == pytest.approx([w / 15 for w in (1, 0, 0, 2, 12, 2)], abs=1e-14)
    assert check(PROBE_T, PLAN_T, precision="fp64", loop=g.inverted_boundary).status == "fault"


@pytest.mark.parametrize(
    ("loop", "ds"), [(accumulate, 2.0), (g.mean_of_means, 3.0)], ids=["right", "mean of means"]
)
def test_probe_t0_is_2_and_the_mean_of_means_3(loop: Callable[[Rank], None], ds: float) -> None:
    (held,) = gradients(PROBE_T0, PLAN_T0, loop)
    assert held["s"] == pytest.approx([ds], abs=1e-14)
    status = check(PROBE_T0, PLAN_T0, precision="fp64", loop=loop).status
    assert status == ("equivalent" if ds == 2.0 else "fault")


# -- the worked loss: 512 tokens at mean 2 beside 1,536 at mean 4


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, values: Tensor) -> Tensor:
        return self.factor * values


WORKED = Experiment(
    model=Constant,
    data=[{"value": torch.full((), 2.0)}] * 512 + [{"value": torch.full((), 4.0)}] * 1536,
    loss=lambda model, batch: Loss(model(batch["value"]).sum(), count=len(batch["value"])),
    count=lambda batch: len(batch["value"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    updates=1,
)


def test_the_worked_loss_is_3_5_and_not_3() -> None:
    """(512 * 2 + 1536 * 4) / 2048 = 3.5; the mean of the two means is 3."""
    plan = Plan((512, 1536), 2, 1)
    right = check(WORKED, plan, precision="fp64")
    assert right.status == "equivalent"
    assert right.updates[0].loss == 3.5
    assert right.updates[0].oracle_loss == 3.5
    # The gradient of factor * values at factor 1 is the loss itself.
    assert gradients(WORKED, plan, accumulate)[0]["factor"] == [3.5]
    assert gradients(WORKED, plan, g.mean_of_means)[0]["factor"] == pytest.approx([3.0], abs=1e-14)
    assert check(WORKED, plan, precision="fp64", loop=g.mean_of_means).status == "fault"


# -- C: microbatch gradients, already over A=2: (1.5, 0) and (0, 2), bound 1


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v


PROBE_C = Experiment(
    model=Pair,
    data=[torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])],
    loss=lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    clip_norm=1.0,
    updates=1,
)


@pytest.mark.parametrize(
    ("loop", "clipped", "causes"),
    [
        # norm of (1.5, 2) is 2.5
        (accumulate, [0.6, 0.8], ()),
        # (1.5, 0) becomes (1, 0); (1, 2) over sqrt(5)
        (g.clip_per_microbatch, [0.4472, 0.8944], ("differs.gradient", "differs.clip")),
        (g.clip_left_out, [1.5, 2.0], ("clip.missing",)),
    ],
    ids=["right", "per microbatch", "left out"],
)
def test_probe_c_tells_where_the_clip_is(
    loop: Callable[[Rank], None], clipped: list[float], causes: tuple[str, ...]
) -> None:
    (trace,) = traces(PROBE_C, Plan(1, 2, 1), loop)
    held = trace.updates[0].clipped["v"]
    assert held is not None
    assert held.tolist() == pytest.approx(clipped, abs=5e-5)
    verdict = check(PROBE_C, Plan(1, 2, 1), precision="fp64", loop=loop)
    assert verdict.status == ("fault" if causes else "equivalent")
    assert not causes or set(causes) & set(verdict.causes)


# -- U: linear decay over 12 updates from 1.0, A=3, D=2, after 3 updates


def linear_decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda calls: 1 - calls / 12)


PROBE_U = Experiment(
    model=Pair,
    data=[torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25])] * 9,
    loss=lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    scheduler=linear_decay,
    updates=3,
)


def scheduler_per_process(rank: Rank) -> None:
    """Each update moves the schedule once a process, as a wrapped scheduler may."""
    moved = rank.scheduler
    rank.scheduler = None
    for one in rank.groups:
        g.accumulated(rank, one)
        rank.optimizer.step()
        for _ in range(rank.D):
            moved.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "lr", "causes"),
    [
        (accumulate, 0.75, ()),
        (u.scheduler_per_microbatch, 0.25, ("sched.per_microbatch",)),
        (scheduler_per_process, 0.5, ("sched.per_process",)),
    ],
    ids=["right", "per microbatch", "per process"],
)
def test_probe_u_tells_what_the_schedule_counts(
    loop: Callable[[Rank], None], lr: float, causes: tuple[str, ...]
) -> None:
    for trace in traces(PROBE_U, Plan(1, 3, 2), loop):
        (((_, held),),) = trace.groups_after
        assert held["lr"] == pytest.approx(lr, abs=1e-12)
    assert check(PROBE_U, Plan(1, 3, 2), precision="fp64", loop=loop).causes == causes
