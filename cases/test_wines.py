"""Three kinds of wine: epochs, an averaged copy of the weights, clips that do nothing.

Forty-eight wines are a group of thirty-two and one of sixteen, so two epochs are four updates.
"""

import pytest
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivtest import Experiment, Loss, plans

wines, kinds = load_wine(return_X_y=True)  # 13 columns, sorted by kind
columns = torch.tensor((wines - wines.mean(0)) / wines.std(0), dtype=torch.float32)
chosen = torch.linspace(0, len(wines) - 1, 48).long()
examples = [{"wine": columns[i], "kind": torch.tensor(kinds[i])} for i in chosen]


def network():
    return nn.Sequential(nn.Linear(13, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(model, batch):
    logits = model(batch["wine"])
    return Loss(cross_entropy(logits, batch["kind"], reduction="sum"), count=len(logits))


def wines_with(optimizer, **settings):
    return Experiment(
        model=network,
        data=examples,
        loss=loss,
        count=lambda batch: len(batch["kind"]),
        optimizer=optimizer,
        scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
        last_group="process",
        shuffle=True,
        **settings,
    )


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-3)


def nesterov(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)


def moving_average(model):
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


two_epochs = wines_with(adam, updates=4)
averaged = wines_with(nesterov, averages=moving_average)

# A bound that no gradient reaches: the clip multiplies by one, or clamps nothing.
norm_within_bound = wines_with(nesterov, clip_norm=100.0)
values_within_bound = wines_with(adam, clip_value=100.0)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32"])
def test_two_epochs(equivalence, plan, precision):
    equivalence(two_epochs, plan, precision=precision)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_averaged(equivalence, plan, precision):
    equivalence(averaged, plan, precision=precision)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
def test_norm_within_bound(equivalence, plan):
    equivalence(norm_within_bound, plan)


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
def test_values_within_bound(equivalence, plan):
    equivalence(values_within_bound, plan)
