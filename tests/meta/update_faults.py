"""Loops whose gradient is right and whose update is wrong: state, schedule, counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from equivtest import Rank
from equivtest.faults.pieces import accumulated, finish

MOMENTS = ("momentum_buffer", "exp_avg")


@dataclass(frozen=True)
class Rebuilt:
    """The optimizer is built at each update, with what it remembered lost."""

    build: Callable[[nn.Module], torch.optim.Optimizer]

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            rank.optimizer = self.build(rank.module)
            accumulated(rank, group)
            finish(rank)


def counter_frozen(rank: Rank) -> None:
    """An optimizer class of one's own whose state never counts: no bias correction."""

    class Uncounted(type(rank.optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for state in self.state.values():
                state["step"].zero_()
            return result

    values = dict(rank.optimizer.defaults)
    values.pop("decoupled_weight_decay", None)  # AdamW sets it itself
    rank.optimizer = Uncounted(rank.module.parameters(), **values)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def counter_reset(rank: Rank) -> None:
    """The counters of the state are put back to 0 after each update."""
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        for state in rank.optimizer.state.values():
            state["step"].zero_()


def momentum_halved(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        for state in rank.optimizer.state.values():
            for key in MOMENTS:
                if key in state:
                    state[key].mul_(0.5)


def learning_rate_off(rank: Rank) -> None:
    """1 % too much."""
    for group in rank.optimizer.param_groups:
        group["lr"] *= 1.01
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def decay_left_out(rank: Rank) -> None:
    for group in rank.optimizer.param_groups:
        group["weight_decay"] = 0.0
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def learning_rate_off_inside(rank: Rank) -> None:
    """1 % too much while the update runs, put back after it: no ``param_groups`` shows it later."""
    for group in rank.groups:
        accumulated(rank, group)
        kept = [dict(held) for held in rank.optimizer.param_groups]
        for held in rank.optimizer.param_groups:
            held["lr"] = held["lr"] * 1.01
        finish(_Unscheduled(rank))  # type: ignore[arg-type]
        for held, before in zip(rank.optimizer.param_groups, kept, strict=True):
            held["lr"] = before["lr"]


class _Unscheduled:
    """The rank without its scheduler."""

    scheduler = None

    def __init__(self, rank: Rank) -> None:
        self._rank = rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rank, name)


@dataclass(frozen=True)
class InsideAClass:
    """An optimizer class of one's own that takes another hyperparameter than its groups say."""

    key: str
    factor: float

    def __call__(self, rank: Rank) -> None:
        key, factor = self.key, self.factor

        class Own(type(rank.optimizer)):  # type: ignore[misc]
            def step(self, closure: Any = None) -> Any:
                kept = [held[key] for held in self.param_groups]
                for held in self.param_groups:
                    held[key] = held[key] * factor
                result = super().step(closure)
                for held, value in zip(self.param_groups, kept, strict=True):
                    held[key] = value
                return result

        values = dict(rank.optimizer.defaults)
        values.pop("decoupled_weight_decay", None)  # AdamW sets it itself
        rank.optimizer = Own(rank.module.parameters(), **values)
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)


@torch.no_grad()
def _shrink(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.mul_(0.99)


def parameters_edited(rank: Rank) -> None:
    """Weights are shrunk by hand between updates."""
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        _shrink(rank.module)


def extra_update(rank: Rank) -> None:
    """The update is asked for twice with one gradient."""
    for group in rank.groups:
        accumulated(rank, group)
        if rank.scaler is not None:
            rank.scaler.unscale_(rank.optimizer)
        if rank.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        rank.optimizer.step()
        rank.optimizer.step()
        if rank.scaler is not None:
            rank.scaler.update()
        if rank.scheduler is not None:
            rank.scheduler.step()
        rank.optimizer.zero_grad()
