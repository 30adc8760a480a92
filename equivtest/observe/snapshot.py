"""Copies of what must not be lost; a tensor that has not changed is held once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Names = Mapping[int, str]
"""Parameter name by the parameter's ``id``."""


class Snapshots:
    """Copies by key; an unchanged tensor gives the object of its last copy, not another copy.

    Equality of two snapshots of one key is then identity, and a trace holds each value once.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], Tensor] = {}

    def tensor(self, kind: str, name: str, value: Tensor) -> Tensor:
        last = self._last.get((kind, name))
        if last is not None and same_bits(last, value):
            return last
        copy = value.detach().clone()
        self._last[kind, name] = copy
        return copy

    def tensors(self, kind: str, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        return {name: self.tensor(kind, name, value) for name, value in named}

    def gradients(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor | None]:
        """Gradients of the parameters; None stays None."""
        return {
            name: None if p.grad is None else self.tensor("gradient", name, p.grad)
            for name, p in named
            if p.requires_grad
        }

    def optimizer_state(self, optimizer: Optimizer, names: Names) -> dict[str, dict[str, Any]]:
        """State by parameter name and key; tensors copied, other values as they are."""
        return {
            names[id(parameter)]: {
                key: self.tensor(key, names[id(parameter)], value)
                if isinstance(value, Tensor)
                else value
                for key, value in state.items()
            }
            for parameter, state in optimizer.state.items()
            if id(parameter) in names
        }


def hyperparameters(
    optimizer: Optimizer, names: Names
) -> tuple[tuple[tuple[str, ...], dict[str, Any]], ...]:
    """For each param group the names of its parameters and a copy of its hyperparameters."""
    return tuple(
        (
            tuple(names.get(id(p), "?") for p in group["params"]),
            {
                key: value.detach().clone() if isinstance(value, Tensor) else value
                for key, value in group.items()
                if key != "params"
            },
        )
        for group in optimizer.param_groups
    )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape, layout and every element (NaN equals nothing, so it is copied)."""
    if a.dtype != b.dtype or a.shape != b.shape or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        return False
    return torch.equal(a, b)
