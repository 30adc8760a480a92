"""Digits by a mixture of experts, whose loads a term of the loss balances over the batch.

The term is a product of two means over the batch (Fedus et al., Switch Transformers, 2021): over
microbatches its mean is not that of the large batch.
"""

import os

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = plans(16, max_D=4) if FULL else [Plan(16, 1, 1), Plan(4, 2, 2), Plan((3, 1), 2, 4)]
WHERE = "first at `mixture` (Mixture)"
PRECISIONS = ["fp64", "fp32"] if FULL else ["fp32"]

EXPERTS = 4

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {"image": torch.tensor(image / 16, dtype=torch.float32), "label": torch.tensor(label)}
    for image, label in zip(images[:32], labels[:32], strict=True)
]


class Mixture(nn.Module):
    """Each row by the expert that it scores highest."""

    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(EXPERTS))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        best = scores.argmax(-1)
        mixed = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            rows = (best == e).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, rows, expert(x[rows]) * scores[rows, e, None])
        share = one_hot(best, EXPERTS).to(scores.dtype).mean(0)
        return mixed, EXPERTS * (share * scores.mean(0)).sum()


class DigitsMixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(64, 16)
        self.mixture = Mixture(16)
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        mixed, balance = self.mixture(self.enter(image).tanh())
        return self.head(mixed), balance


def loss(model, batch):
    logits, balance = model(batch["image"])
    total = cross_entropy(logits, batch["label"], reduction="sum")
    return Loss(total + 0.1 * balance * len(logits), count=len(logits))


digits_mixture = Experiment(
    model=DigitsMixture,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    updates=2,
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_balanced_loads(equivalence, plan, precision):
    expect = "equivalent" if plan.m == 16 else "source.coupling"
    verdict = equivalence(digits_mixture, plan, precision=precision, expect=expect)
    assert [row.where for row in verdict.source_rows] == ([] if plan.m == 16 else [WHERE])
