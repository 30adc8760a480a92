"""Counts per hour and one rate for all of them: sums over many microbatches that lose their terms.

While the rate is too low every hour pulls it the same way, and a sum of many equal terms rounds the
same way each time. In bfloat16 a sum takes no more terms from 256 of them on. In float32 one hour
of a broken counter is so large that the others vanish beside it. A loop that adds them up as torch
does makes no mistake, and the update is not that of the large batch either.
"""

import os

import pytest
import torch
from torch import nn
from torch.nn.functional import poisson_nll_loss

from equivtest import Experiment, Loss, Plan

FULL = os.environ.get("EQUIVTEST_FULL") == "1"


class Rate(nn.Module):
    """The logarithm of one rate, which starts at one an hour."""

    def __init__(self):
        super().__init__()
        self.logarithm = nn.Parameter(torch.zeros(1))

    def forward(self, hours):
        return self.logarithm.expand_as(hours)


def loss(model, counts):
    return Loss(poisson_nll_loss(model(counts), counts, reduction="sum"), count=len(counts))


def hours(counts):
    return Experiment(
        model=Rate,
        data=[torch.tensor([float(count)]) for count in counts],
        loss=loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-9),
        updates=1,
    )


twice_an_hour = hours([2] * 512)  # an hour's gradient is 1 - 2

# 2^23 too many, and then half of one too many in each hour: 2^-24 of it, which float32 loses.
broken_counter = hours([1 + 2**23] + [1.5] * 511)


ONE_BY_ONE = [Plan(1, 512, 1), Plan(1, 256, 2), Plan(1, 128, 4)]
TOGETHER = [Plan(8, 64, 1), Plan(4, 64, 2), Plan(16, 8, 4)]
PLANS = ONE_BY_ONE + TOGETHER if FULL else [ONE_BY_ONE[0], ONE_BY_ONE[2], TOGETHER[2]]


# 512 terms lose half of their sum, and 4 sqrt(512) u = 0.35 is allowed; 256 lose nothing.
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "bf16"] if FULL else ["bf16"])
def test_equal_terms(equivalence, plan, precision):
    lost = plan.A == 512 and precision == "bf16"
    expect = "source.accumulator_dtype" if lost else "equivalent"
    equivalence(twice_an_hour, plan, precision=precision, expect=expect)


# All of the first replica's terms but one are lost, A - 1 of them, each of one u; 4 sqrt(512) u =
# 91 u are allowed. Several hours in a microbatch are not lost, and a double has room for one.
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp64"] if FULL else ["fp32"])
def test_terms_beside_a_large_one(equivalence, plan, precision):
    lost = plan.m == 1 and precision == "fp32"
    expect = "source.reduction_order" if lost else "equivalent"
    equivalence(broken_counter, plan, precision=precision, expect=expect)
