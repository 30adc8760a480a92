"""A reported loss is compared with the update's, and never makes a case fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from diagnose.ragged import PLAN, ragged

from equivtest import Plan, Rank, check
from equivtest.faults.pieces import backward, finish, reducing_last, summed
from equivtest.loops import normalised


@dataclass(frozen=True)
class Reporting:
    """The update's loss times a factor of the plan, or what else is made of its sum on a rank."""

    factor: Callable[[int, int], float] = lambda A, D: 1.0
    alone: bool = False
    times: int = 1

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            shares = []
            for k, batch in enumerate(group):
                with reducing_last(rank, group, k):
                    with rank.autocast():
                        share = normalised(rank.loss(rank.model, batch), group)
                    backward(rank, share * rank.D)
                shares.append(share.detach())
            loss = float(torch.stack(shares).sum())
            if self.alone:
                loss *= group.count / group.local_count
            else:
                loss = summed(rank, loss)
            for _ in range(self.times):
                rank.report(loss * self.factor(len(group), rank.D) / self.times)
            finish(rank)


FACTORS = [
    (lambda A, D: A, "3 = A times", PLAN),
    (lambda A, D: 1 / A, "0.3333 = 1/A times", PLAN),
    (lambda A, D: D, "2 = D times", PLAN),
    (lambda A, D: 1 / D, "0.5 = 1/D times", PLAN),
    (lambda A, D: A * D, "6 = A D times", PLAN),
    (lambda A, D: A, "2 = A or D times", Plan(3, 2, 2)),
]


@pytest.mark.parametrize(("factor", "told", "plan"), FACTORS)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_a_factor_of_the_plan_is_noted(
    factor: Callable[[int, int], float], told: str, plan: Plan, precision: str
) -> None:
    loop = Reporting(factor)
    verdict = check(ragged(), plan, precision=precision, loop=loop, expect="log.loss_factor")
    assert (verdict.status, verdict.passed) == ("equivalent", True), verdict.explain()
    assert any(told in note for note in verdict.notes), verdict.notes


@pytest.mark.parametrize("loop", [None, Reporting(), Reporting(times=3)])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
def test_the_updates_own_loss_is_right_and_so_is_none(loop: Reporting, precision: str) -> None:
    verdict = check(ragged(), PLAN, precision=precision, loop=loop)
    assert verdict.status == "equivalent"
    assert not any("reports a loss" in note for note in verdict.notes), verdict.notes


@pytest.mark.parametrize(
    ("loop", "told"),
    [
        (Reporting(lambda A, D: 1.25), "1.25 times"),
        (Reporting(alone=True), "that of its own microbatches alone"),
    ],
)
def test_another_number_is_told_and_not_named(loop: Reporting, told: str) -> None:
    verdict = check(ragged(), PLAN, loop=loop)
    assert (verdict.status, verdict.noted) == ("equivalent", ())
    assert any(told in note for note in verdict.notes), verdict.notes
