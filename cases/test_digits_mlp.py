"""Handwritten digits, a two-layer network, SGD with momentum: the place to start copying."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from equivtest import Experiment, Loss, plans

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {"image": torch.tensor(image / 16, dtype=torch.float32), "label": torch.tensor(label)}
    for image, label in zip(images[:64], labels[:64], strict=True)
]


class DigitsMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(64, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, image):
        return self.head(self.hidden(image).relu())


def loss(model, batch):
    logits = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


digits_mlp = Experiment(
    model=DigitsMLP,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    updates=2,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"])
def test_digits_mlp(equivalence, plan, precision):
    equivalence(digits_mlp, plan, precision=precision)
