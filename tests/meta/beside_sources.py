"""A model with BatchNorm and dropout, in which faults are planted beside these sources."""

from __future__ import annotations

from dataclasses import replace

import torch
from meta.composed import Loop, Planted
from meta.pairs import PLAN, ragged
from torch import Tensor, nn

from equivtest import Experiment, Loss, Verdict, check

ROWS = 6
COUNTS = (3, 5, 2, 4, 6, 1, 5, 3, 2, 6, 4, 5, 1, 3, 6, 2, 4, 5, 3, 2, 6, 1, 5, 4)
"""Supervised rows of each example: two groups of 12."""


class Net(nn.Module):
    """4 features to 3 classes; every row is normalised, supervised or not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Features (batch, rows, 4) to scores (batch x rows, 3)."""
        hidden = self.norm(torch.tanh(self.first(x.flatten(0, 1))))
        scores: Tensor = self.last(self.drop(hidden))
        return scores


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    total = nn.functional.cross_entropy(
        model(batch["x"]), batch["target"].flatten(), ignore_index=-100, reduction="sum"
    )
    return Loss(total=total, count=(batch["target"] != -100).sum())


def examples() -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(3)
    made = []
    for count in COUNTS:
        target = torch.randint(0, 3, (ROWS,), generator=drawn)
        target[count:] = -100
        made.append({"x": torch.randn(ROWS, 4, generator=drawn), "target": target})
    return made


def noisy(needs: frozenset[str] = frozenset()) -> Experiment:
    """As ``ragged``, with another model, its data and its loss."""
    return replace(
        ragged(needs),
        model=Net,
        data=examples(),
        loss=loss,
        collate=None,
        count=lambda batch: (batch["target"] != -100).sum(),
    )


def beside_sources(fault: type[Planted] | None, precision: str) -> Verdict:
    """The verdict on the loop with this fault, or on the right one with what the fault needs."""
    loop = Loop() if fault is None else fault()
    needs = frozenset() if fault is None else fault.needs
    return check(noisy(needs), PLAN, precision=precision, loop=loop)
