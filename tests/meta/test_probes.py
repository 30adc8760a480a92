"""The verdicts on the probes: the weights that probe T reads out are those that are found.

The numbers themselves are in ``tests/faults``.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from faults.probes import (
    PLAN_T,
    PLAN_T0,
    PROBE_C,
    PROBE_T,
    PROBE_T0,
    PROBE_U,
    gradients,
    traces,
)
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.faults import accumulation as a
from equivtest.faults import clip as c
from equivtest.faults import normalisation as n
from equivtest.faults import schedule
from equivtest.faults import synchronisation as s
from equivtest.loops import accumulate

FOUND = {
    n.mean_of_means_both: [2.5] * 6,
    n.local_denominator_dp: [1.25, 3.75, 2.5, 5 / 3, 5.0, 5 / 6],
    n.missing_world_size: [0.5, 1.5, 1, 1, 3, 0.5],
    n.double_accum_division: [1 / 3, 1, 2 / 3, 2 / 3, 2, 1 / 3],
    a.only_last: [0, 0, 2, 0, 0, 1],
}
"""Loop: weights in units of 1/15, where 1, 3, 2, 2, 6, 1 are right."""


@pytest.mark.parametrize("loop", FOUND, ids=lambda loop: loop.__name__)
def test_the_verdict_finds_the_weights_that_probe_t_reads_out(
    loop: Callable[[Rank], None],
) -> None:
    verdict = check(PROBE_T, PLAN_T, precision="fp64", loop=loop)
    assert verdict.status == "fault"
    planted = zip(FOUND[loop], [1, 3, 2, 2, 6, 1], strict=True)
    found = verdict.weights.sort_values(["replica", "microbatch"])["found"].tolist()
    assert found == pytest.approx([w / r for w, r in planted], abs=1e-9)


@pytest.mark.parametrize("loop", [s.never, s.inverted_boundary], ids=["never", "inverted"])
def test_ranks_that_differ_are_a_fault(loop: Callable[[Rank], None]) -> None:
    assert check(PROBE_T, PLAN_T, precision="fp64", loop=loop).status == "fault"


@pytest.mark.parametrize(
    ("experiment", "plan"), [(PROBE_T, PLAN_T), (PROBE_T0, PLAN_T0)], ids=["T", "T0"]
)
def test_the_recipe_is_right_on_the_probes(experiment: Experiment, plan: Plan) -> None:
    assert check(experiment, plan, precision="fp64").status == "equivalent"


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
    assert gradients(WORKED, plan, n.mean_of_means_accum)[0]["factor"] == pytest.approx(
        [3.0], abs=1e-14
    )
    assert check(WORKED, plan, precision="fp64", loop=n.mean_of_means_accum).status == "fault"


# -- C: where the clip is


@pytest.mark.parametrize(
    ("loop", "causes"),
    [
        (accumulate, ()),
        (c.per_microbatch, ("clip.per_microbatch", "differs.gradient", "differs.clip")),
        (c.missing, ("clip.missing",)),
    ],
    ids=["right", "per microbatch", "missing"],
)
def test_the_verdict_on_probe_c(loop: Callable[[Rank], None], causes: tuple[str, ...]) -> None:
    verdict = check(PROBE_C, Plan(1, 2, 1), precision="fp64", loop=loop)
    assert verdict.status == ("fault" if causes else "equivalent")
    assert not causes or set(causes) & set(verdict.causes)


# -- U: linear decay over 12 updates from 1.0, A=3, D=2, after 3 updates


@pytest.mark.parametrize(
    ("loop", "lr", "causes"),
    [
        (accumulate, 0.75, ()),
        (schedule.per_microbatch, 0.25, ("sched.per_microbatch",)),
        (schedule.per_process, 0.5, ("sched.per_process",)),
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
