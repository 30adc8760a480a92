"""A run that shows what a report shows: right splits, three wrong loops and two sources.

``make example`` runs it and keeps its page as ``reports/example.html``. Not collected by ``make
test``: its faults are meant to fail.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from equivtest import Experiment, Loss, Plan, Rank, plans

images, labels = load_digits(return_X_y=True)
# Pixels of a digit are supervised where they are lit: another count for every image.
digits = [
    (torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
    for x, y in zip(images[:64], labels[:64], strict=True)
]


def reconstruction(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> Loss:
    x, _ = batch
    lit = x > 0
    return Loss(total=((model(x) - x).square() * lit).sum(), count=lit.sum())


def autoencoder() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 64))


def with_sources() -> nn.Module:
    norm, dropped = nn.BatchNorm1d(24), nn.Dropout(0.1)
    return nn.Sequential(nn.Linear(64, 24), norm, nn.GELU(), dropped, nn.Linear(24, 64))


def experiment(model: object) -> Experiment:
    return Experiment(
        model=model,  # type: ignore[arg-type]
        data=digits,
        loss=reconstruction,
        count=lambda batch: (batch[0] > 0).sum(),
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
        scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**10),
    )


digits_autoencoder = experiment(autoencoder)
digits_batchnorm_dropout = experiment(with_sources)


def mean_of_means(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (loss.total / loss.count / len(group)).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def own_denominator(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (loss.total / group.local_count).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def never_cleared(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (loss.total / group.count * rank.D).backward()
        rank.optimizer.step()


PRECISIONS = ["fp64", "fp32", "bf16-mixed", "fp16-mixed"]


@pytest.mark.parametrize("plan", plans(32, max_D=4), ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_recipe(equivalence, plan: Plan, precision: str) -> None:  # type: ignore[no-untyped-def]
    equivalence(digits_autoencoder, plan, precision=precision)


@pytest.mark.parametrize("plan", [Plan(4, 2, 4), Plan(4, 4, 2), Plan(8, 4, 1)], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    "loop", [mean_of_means, own_denominator, never_cleared], ids=lambda loop: loop.__name__
)
def test_loops(equivalence, plan: Plan, precision: str, loop) -> None:  # type: ignore[no-untyped-def]
    equivalence(digits_autoencoder, plan, precision=precision, loop=loop)


@pytest.mark.parametrize("plan", [Plan(8, 4, 1), Plan(8, 2, 2)], ids=str)
@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
def test_sources(equivalence, plan: Plan, precision: str) -> None:  # type: ignore[no-untyped-def]
    sources = {"source.batchnorm", "source.dropout"}
    equivalence(digits_batchnorm_dropout, plan, precision=precision, expect=sources)
