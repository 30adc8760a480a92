"""Digits of which half have a label: two terms with counts of their own, and two optimizers.

Every image is reconstructed and counts its pixels; a labelled one is classified as well and counts
as one label. Each term is divided by its own count over the whole group.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from equivtest import Experiment, Loss, plans

UNLABELLED = -100

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
labelled = torch.rand(64, generator=torch.Generator().manual_seed(0)) < 0.5
examples = [
    {
        "image": torch.tensor(images[i] / 16, dtype=torch.float32),
        "label": torch.tensor(labels[i] if labelled[i] else UNLABELLED),
    }
    for i in range(64)
]


class HalfLabelled(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 24)
        self.decode = nn.Linear(24, 64)
        self.classify = nn.Linear(24, 10)

    def forward(self, image):
        code = self.encode(image).tanh()
        return self.decode(code), self.classify(code)


def counts(batch):
    return {
        "pixels": batch["image"].numel(),
        "labels": (batch["label"] != UNLABELLED).sum(),
    }


def loss(model, batch):
    painted, logits = model(batch["image"])
    count = counts(batch)
    pixels = mse_loss(painted, batch["image"], reduction="sum")
    labels = cross_entropy(logits, batch["label"], ignore_index=UNLABELLED, reduction="sum")
    return {
        "pixels": Loss(pixels, count=count["pixels"]),
        "labels": Loss(labels, count=count["labels"]),
    }


def two_optimizers(model):
    coder = [*model.encode.parameters(), *model.decode.parameters()]
    return {
        "coder": torch.optim.AdamW(coder, lr=1e-2),
        "classifier": torch.optim.SGD(model.classify.parameters(), lr=0.1, momentum=0.9),
    }


def schedulers(optimizers):
    return {
        name: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
        for name, optimizer in optimizers.items()
    }


half_labelled = Experiment(
    model=HalfLabelled,
    data=examples,
    loss=loss,
    count=counts,
    optimizer=two_optimizers,
    scheduler=schedulers,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_half_labelled(equivalence, plan, precision):
    equivalence(half_labelled, plan, precision=precision)
