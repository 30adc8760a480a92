"""Upper and lower halves of digits, matched among those of the batch: in-batch negatives.

A microbatch of m has m - 1 negatives for each half, the large batch one less than all: the loss of
a smaller microbatch is another, easier one, whatever the loop does.
"""

import os

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = plans(16, max_D=4) if FULL else [Plan(16, 1, 1), Plan(4, 4, 1), Plan(2, 2, 4)]
WHERE = "in the loss"
PRECISIONS = ["fp64", "fp32", "bf16-mixed"] if FULL else ["fp32"]

images, _ = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {"upper": image[:32], "lower": image[32:]}
    for image in torch.tensor(images[:32] / 16, dtype=torch.float32)
]


class Halves(nn.Module):
    """Both halves as unit vectors."""

    def __init__(self):
        super().__init__()
        self.upper = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))
        self.lower = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, upper, lower):
        return normalize(self.upper(upper), dim=-1), normalize(self.lower(lower), dim=-1)


def loss(model, batch):
    upper, lower = model(batch["upper"], batch["lower"])
    scores = upper @ lower.T / 0.1
    own = torch.arange(len(scores), device=scores.device)
    return Loss(cross_entropy(scores, own, reduction="sum"), count=len(scores))


matching_halves = Experiment(
    model=Halves,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["upper"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    updates=2,
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_negatives_in_the_batch(equivalence, plan, precision):
    expect = "equivalent" if plan.m == 16 else "source.coupling"
    verdict = equivalence(matching_halves, plan, precision=precision, expect=expect)
    assert [row.where for row in verdict.source_rows] == ([] if plan.m == 16 else [WHERE])
