"""Thirty images where a group wants thirty-two, and what becomes of the last group.

The network fills in hidden pixels of handwritten digits. Each image hides another number of them,
so a smaller last group also has another denominator, and dropping it drops other pixels.
"""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import gelu, mse_loss

from equivtest import Experiment, Loss, plans

images, _ = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
shares = torch.linspace(0.1, 0.9, 30)
noise = torch.rand(30, 64, generator=torch.Generator().manual_seed(0))
examples = [
    {"image": torch.tensor(image / 16, dtype=torch.float32), "hidden": draw < share}
    for image, draw, share in zip(images[:30], noise, shares, strict=True)
]


class Inpainter(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(64, 48)
        self.norm = nn.LayerNorm(48)
        self.decode = nn.Linear(48, 64)

    def forward(self, image, hidden):
        seen = image.masked_fill(hidden, 0.0)
        return self.decode(gelu(self.norm(self.encode(seen))))


def supervised(batch):
    return batch["hidden"].sum()


def loss(model, batch):
    hidden = batch["hidden"]
    painted = model(batch["image"], hidden)
    total = mse_loss(painted[hidden], batch["image"][hidden], reduction="sum")
    return Loss(total, count=supervised(batch))


def thirty_images(**settings):
    return Experiment(
        model=Inpainter,
        data=examples,
        loss=loss,
        count=supervised,
        optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
        scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
        **settings,
    )


# 30 of 32: every group is a last group, and each update is an epoch.
short_epoch = thirty_images(last_group="process", updates=2)

# 30 = 3 * 8 + 6: the fourth update has six examples, the fifth begins another epoch.
last_group_processed = thirty_images(last_group="process", updates=5, shuffle=True)

# The same six dropped instead: the fourth update already begins another epoch.
last_group_dropped = thirty_images(last_group="drop", updates=4, shuffle=True)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_short_epoch(equivalence, plan, precision):
    equivalence(short_epoch, plan, precision=precision)


@pytest.mark.parametrize("plan", plans(8, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_last_group_processed(equivalence, plan, precision):
    equivalence(last_group_processed, plan, precision=precision)


@pytest.mark.parametrize("plan", plans(8, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_last_group_dropped(equivalence, plan, precision):
    equivalence(last_group_dropped, plan, precision=precision)
