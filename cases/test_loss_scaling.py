"""Float16 with a loss scale that starts too high: updates that the scaler skips.

A skipped update moves nothing, halves the scale and does not move the schedule, which counts the
updates applied. Skipping is right where the gradient overflows, and a fault where it does not.
"""

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


def network():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def loss(model, batch):
    logits = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


loss_scaling = Experiment(
    model=network,
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
    scheduler_unit="applied",
    clip_norm=1.0,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**23, backoff_factor=2.0**-8),
    updates=3,
)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
def test_loss_scaling(equivalence, plan):
    equivalence(loss_scaling, plan, precision="fp16-mixed")
