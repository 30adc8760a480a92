"""Handwritten digits, a convolutional network, SGD with Nesterov momentum, a clip by value.

GroupNorm normalises each image by itself, so that it does not matter how a batch is cut. BatchNorm
normalises over the microbatch, and would.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from equivtest import Experiment, Loss, plans

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {
        "image": torch.tensor(image / 16, dtype=torch.float32).reshape(1, 8, 8),
        "label": torch.tensor(label),
    }
    for image, label in zip(images[:64], labels[:64], strict=True)
]


def digits_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def loss(model, batch):
    logits = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


digits_conv = Experiment(
    model=digits_net,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=nesterov,
    clip_value=0.02,  # active: a third of the first gradient's elements are beyond it
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp16-mixed"])
def test_digits_conv(equivalence, plan, precision):
    equivalence(digits_conv, plan, precision=precision)
