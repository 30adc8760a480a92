"""A rank by hand, without any process group."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from equivtest import Loss, Rank


class Bare(nn.Module):
    """A wrapper that reduces nothing and remembers for which forwards it would have."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.reduces = True
        self.forwards: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.forwards.append(self.reduces)
        return self.module(x)

    @contextlib.contextmanager
    def no_sync(self):
        self.reduces = False
        try:
            yield
        finally:
            self.reduces = True


def total(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(model(batch).sum(), count=len(batch))


def weight(value: float = 0.0) -> nn.Linear:
    module = nn.Linear(1, 1, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def a_rank(module: nn.Module, **changes: Any) -> Rank:
    given: dict[str, Any] = {
        "model": Bare(module),
        "module": module,
        "optimizer": torch.optim.SGD(module.parameters(), lr=1.0),
        "scheduler": None,
        "scaler": None,
        "average": None,
        "groups": (),
        "D": 1,
        "dp_rank": 0,
        "dp_group": None,
        "device": torch.device("cpu"),
        "loss": total,
        "dataset": (),
        "scheduler_unit": "applied",
        "clip_norm": None,
        "clip_value": None,
        "_autocast": contextlib.nullcontext,
    }
    return Rank(**{**given, **changes})
