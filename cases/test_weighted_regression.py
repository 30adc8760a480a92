"""Regression in which every example has a weight: what counts is the sum of weights.

A mean over weighted examples divides by the sum of their weights, which is another one for each
microbatch. So the group's sum is the denominator, and no microbatch's own.
"""

import pytest
import torch
from sklearn.datasets import load_diabetes
from torch import nn

from equivtest import Experiment, Loss, Plan, plans

patients, progression = load_diabetes(return_X_y=True)  # 10 columns of mean 0 and norm 1
inputs = torch.tensor(patients[:64] * len(patients) ** 0.5, dtype=torch.float32)
targets = torch.tensor(progression[:64] / 100, dtype=torch.float32)
weights = 1 / (1 + inputs[:, 2] ** 2)  # the further from the average body mass, the less
examples = [
    {"patient": x, "progression": y, "weight": w}
    for x, y, w in zip(inputs, targets, weights, strict=True)
]


def regression():
    return nn.Sequential(nn.Linear(10, 16), nn.Softplus(), nn.Linear(16, 1))


def loss(model, batch):
    error = model(batch["patient"]).squeeze(1) - batch["progression"]
    weight = batch["weight"]
    return Loss((weight * error.square()).sum(), count=weight.sum())


weighted_regression = Experiment(
    model=regression,
    data=examples,
    loss=loss,
    count=lambda batch: batch["weight"].sum(),
    optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-2),
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)

# Replicas of one plan hold as many examples each, in microbatches of any sizes.
UNEQUAL = [
    Plan((1, 31), 2, 1),
    Plan((20, 9, 3), 3, 1),
    Plan((7, 1, 2, 9, 13), 5, 1),
    Plan((15, 1), 2, 2),
    Plan((2, 3, 11), 3, 2),
    Plan((1, 1, 6, 8), 4, 2),
    Plan((3, 5), 2, 4),
    Plan((4, 1, 3), 3, 4),
]


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32"])
def test_weighted_regression(equivalence, plan, precision):
    equivalence(weighted_regression, plan, precision=precision)


@pytest.mark.parametrize("plan", UNEQUAL, ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_unequal_microbatches(equivalence, plan, precision):
    equivalence(weighted_regression, plan, precision=precision)
