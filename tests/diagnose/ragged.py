"""A small experiment with uneven counts, on which loops are planted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Loss, Plan

PLAN = Plan(2, 3, 2)
COUNTS = (3, 5, 2, 4, 6, 1, 5, 3, 2, 6, 4, 5, 1, 3, 6, 2, 4, 5, 3, 2, 6, 1, 5, 4)
"""Supervised rows of each example, of six; two groups of 12."""


class Net(nn.Module):
    """Two layers, 4 features to 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Shape (..., 4) to (..., 3)."""
        hidden: Tensor = self.first(x)
        scores: Tensor = self.second(torch.tanh(hidden))
        return scores


def loss(model: Any, batch: dict[str, Tensor]) -> Loss:
    """Summed cross-entropy over the targets that are not -100."""
    scores = model(batch["x"])
    total = F.cross_entropy(
        scores.flatten(0, 1), batch["target"].flatten(), ignore_index=-100, reduction="sum"
    )
    return Loss(total=total, count=(batch["target"] != -100).sum())


def examples(counts: tuple[int, ...] = COUNTS, size: float = 1.0) -> list[dict[str, Tensor]]:
    """Six rows each, the first ``counts[i]`` of them supervised."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for count in counts:
        x = torch.randn(6, 4, generator=generator) * size
        target = torch.randint(0, 3, (6,), generator=generator)
        target[count:] = -100
        made.append({"x": x, "target": target})
    return made


def ragged(**changes: Any) -> Experiment:
    """AdamW on ``examples``, two updates."""
    given: dict[str, Any] = {
        "model": Net,
        "data": examples(),
        "loss": loss,
        "count": lambda batch: (batch["target"] != -100).sum(),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        "updates": 2,
    }
    return Experiment(**{**given, **changes})
