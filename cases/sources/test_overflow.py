"""Float16 and one scan in other units: its gradient overflows in one microbatch of one replica.

Averaging over D replicas is undone by a factor D on the loss, so a replica's float16 gradients are
D times as large as those of the large batch. At a loss scale between the two the scaler skips an
update that the large batch applies: no mistake of the loop, and not the same experiment either.
"""

import os
from dataclasses import replace

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from equivtest import Experiment, Loss, Plan, plans

FULL = os.environ.get("EQUIVTEST_FULL") == "1"
PLANS = plans(32, max_D=4) if FULL else [Plan(8, 4, 1), Plan(16, 1, 2), Plan(2, 4, 4)]

images, labels = load_digits(return_X_y=True)  # 8 x 8 pixels, each 0..16
examples = [
    {"image": torch.tensor(image / 16, dtype=torch.float32), "label": torch.tensor(label)}
    for image, label in zip(images[:64], labels[:64], strict=True)
]
examples[45]["image"] *= 3072  # as a scanner of another make stores it


def loss(model, batch):
    logits = model(batch["image"])
    return Loss(cross_entropy(logits, batch["label"], reduction="sum"), count=len(logits))


def doubling_from(scale):
    """A loss scale that doubles with every update that is applied."""
    return lambda device: torch.amp.GradScaler(device, init_scale=scale, growth_interval=1)


# A weight's gradient is up to its scan's 3072, times scale / 32 and in the loop times D. The odd
# scan is in the second group: at a scale of 512 it gives 49152, and float16 ends at 65504.
odd_scan = Experiment(
    model=lambda: nn.Linear(64, 10),
    data=examples,
    loss=loss,
    count=lambda batch: len(batch["label"]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
    scheduler_unit="applied",
    scaler=doubling_from(256.0),
    updates=3,
)
odd_scan_at_twice_the_scale = replace(odd_scan, scaler=doubling_from(512.0))


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_update_that_several_replicas_skip(equivalence, plan):
    expect = "source.scaler_skip" if plan.D > 1 else "equivalent"
    equivalence(odd_scan, plan, precision="fp16-mixed", expect=expect)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_an_update_that_the_large_batch_skips_too(equivalence, plan):
    equivalence(odd_scan_at_twice_the_scale, plan, precision="fp16-mixed")
