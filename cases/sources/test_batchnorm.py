"""Handwritten digits and a convolutional network with BatchNorm, which normalises each microbatch.

The gradient goes through the mean and variance of the rows that are normalised together: 32 images
in one batch are another function of the weights than the same images four by four, and the running
statistics move once a microbatch, not once an update. No loop is at fault. With the large batch
normalised microbatch by microbatch, nothing is left of the difference.

Frozen, BatchNorm is a fixed affine map, and GroupNorm normalises each image by itself: then it does
not matter how a batch is cut.
"""

import os
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = plans(32, max_D=4) if FULL else [Plan(8, 2, 2), Plan(2, 4, 4)]
PRECISIONS = ["fp64", "fp32", "bf16-mixed"] if FULL else ["fp32"]
UNEQUAL = Plan((3, 5), 2, 4)

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {
        "image": torch.tensor(image / 16, dtype=torch.float32).reshape(1, 8, 8),
        "label": torch.tensor(label),
    }
    for image, label in zip(images[:64], labels[:64], strict=True)
]


def digits_net(norm):
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        norm(16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Frozen(nn.BatchNorm2d):
    """By running statistics that a pretrained network would bring, as detectors are fine-tuned."""

    def train(self, mode=True):
        return super().train(False)


def loss(model, batch):
    logits = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


def in_training():
    return digits_net(nn.BatchNorm2d)


def frozen():
    return digits_net(Frozen).train()


digits_batchnorm = Experiment(
    model=in_training,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    updates=2,
)
digits_frozen = replace(digits_batchnorm, model=frozen)


def each_keeps_its_own(module):
    """Replicas do not take over rank 0's running statistics."""
    return DistributedDataParallel(module, broadcast_buffers=False)


@pytest.mark.parametrize("plan", [*PLANS, UNEQUAL], ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_batchnorm(equivalence, plan, precision):
    whole = plan.A * plan.D == 1  # one microbatch is the large batch
    expect = "equivalent" if whole else "source.batchnorm"
    equivalence(digits_batchnorm, plan, precision=precision, expect=expect)


@pytest.mark.parametrize("plan", [PLANS[-1]], ids=str)
def test_statistics_that_are_not_broadcast(equivalence, plan):
    equivalence(digits_batchnorm, plan, wrap=each_keeps_its_own, expect="source.batchnorm")


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_frozen_batchnorm(equivalence, plan):
    equivalence(digits_frozen, plan)
