"""A loss whose total is in half precision: its root factor is the nearest number there is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.loops import accumulate


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)


GENERATOR = torch.Generator().manual_seed(5)
HALVES = Experiment(
    model=Line,
    data=[torch.randn(3, generator=GENERATOR) for _ in range(12)],
    # ``sum`` of a bfloat16 output stays bfloat16 under autocast on the CPU
    loss=lambda model, batch: Loss(model(batch).sum(), len(batch)),
    count=len,
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
)


def six_percent_more(rank: Rank) -> None:
    """6 % is 16 units of a bfloat16 number, and no rounding."""

    for group in rank.groups:
        for k, batch in enumerate(group):
            with rank.autocast():
                total = rank.loss(rank.model, batch).total
            weight = 1.06 if k == 0 else 1.0
            (total * (weight * rank.D / group.count)).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize("plan", [Plan(1, 3, 2), Plan(2, 3, 2), Plan(1, 6, 1)], ids=str)
def test_a_factor_that_bfloat16_rounds_is_right(plan: Plan) -> None:
    """2/12, 2/6 and 1/6 have no bfloat16: 0.33398 for 1/3 is 0.2 % off, within u = 2**-8."""
    verdict = check(HALVES, plan, precision="bf16-mixed", loop=accumulate)
    assert verdict.status == "equivalent", verdict.explain()


def test_a_factor_that_no_rounding_gives_is_not() -> None:
    verdict = check(HALVES, Plan(1, 3, 2), precision="bf16-mixed", loop=six_percent_more)
    assert verdict.status == "fault", verdict.explain()
