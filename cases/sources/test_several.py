"""Three known sources in one experiment, each with its share: BatchNorm, dropout and a contrast.

Two noisy views of each digit are drawn together and pushed away from the other digits of their
microbatch: the fewer there are, the easier. Dropout draws other masks for a split than for a large
batch, and BatchNorm has other statistics. With all three isolated the two are equal to rounding.
"""

import os

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = [p for p in plans(32, max_D=4) if 1 < p.m < 32] if FULL else [Plan(4, 2, 4)]
PRECISIONS = ["fp32", "bf16-mixed"] if FULL else ["fp32"]
TEMPERATURE = 0.2

images, _ = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
generator = torch.Generator().manual_seed(0)


def view(image):
    return torch.tensor(image / 16, dtype=torch.float32) + 0.1 * torch.randn(
        64, generator=generator
    )


examples = [{"one": view(image), "other": view(image)} for image in images[:64]]


def encoder():
    return nn.Sequential(
        nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 16)
    )


def loss(model, batch):
    one = normalize(model(batch["one"]), dim=1)
    other = normalize(model(batch["other"]), dim=1)
    own = torch.arange(len(one), device=one.device)
    total = cross_entropy(one @ other.T / TEMPERATURE, own, reduction="sum")
    return Loss(total, count=len(one))


several = Experiment(
    model=encoder,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["one"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    updates=2,
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_several(equivalence, plan, precision):
    expect = {"source.batchnorm", "source.dropout", "source.coupling"}
    equivalence(several, plan, precision=precision, expect=expect)
