"""Optimizers that run, decay or count otherwise than once per update."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Rank
from equivtest.faults.pieces import accumulated, backward, finish, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates
from equivtest.loops import several
from equivtest.plan import Plan

DECAY = 0.1


def update_per_microbatch(rank: Rank) -> None:
    """The update is inside the loop over microbatches."""
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
            finish(rank)


def decay_per_microbatch(rank: Rank) -> None:
    """Every microbatch decays the weights; with the last one the optimizer itself does."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            if k < len(group) - 1:
                decay(rank)
        finish(rank)


@torch.no_grad()
def decay(rank: Rank) -> None:
    """What one update decays, decoupled from the gradient."""
    for optimizer in several(rank.optimizer):
        for held in optimizer.param_groups:
            for parameter in held["params"]:
                parameter.mul_(1 - held["lr"] * held.get("weight_decay", 0.0))


def counter_frozen(rank: Rank) -> None:
    """An optimizer class of one's own whose state never counts: bias correction stays at its first.

    https://github.com/allenai/OLMo-core/issues/309
    """
    rank.optimizer = _each(rank.optimizer, _uncounted)
    own = several(rank.optimizer)
    for scheduler in several(rank.scheduler) if rank.scheduler is not None else []:
        scheduler.optimizer = own[0] if len(own) == 1 else _same_groups(scheduler.optimizer, own)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


def _uncounted(optimizer: Optimizer) -> Optimizer:
    class Uncounted(type(optimizer)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> Any:
            result = super().step(closure)
            for state in self.state.values():
                state["step"] = state["step"] * 0
            return result

    values = dict(optimizer.defaults)
    values.pop("decoupled_weight_decay", None)  # AdamW sets it itself
    return Uncounted([dict(held) for held in optimizer.param_groups], **values)


def _each(made: Any, change: Callable[[Optimizer], Optimizer]) -> Any:
    if isinstance(made, Mapping):
        return {name: change(one) for name, one in made.items()}
    return change(made)


def _same_groups(before: Optimizer, candidates: list[Any]) -> Optimizer:
    """The one that holds the parameters of ``before``."""
    first = before.param_groups[0]["params"][0]
    return next(one for one in candidates if one.param_groups[0]["params"][0] is first)


# -- experiments in which they show


@dataclass(frozen=True)
class Decayed:
    """The optimizer that ``make`` makes, with weight decay where it has a place for it."""

    make: Callable[[Any], Any]

    def __call__(self, model: Any) -> Any:
        made = self.make(model)
        for optimizer in several(made):
            for held in optimizer.param_groups:
                if "weight_decay" in held:
                    held["weight_decay"] = held["weight_decay"] or DECAY
        return made


def decayed(experiment: Experiment, plan: Plan) -> Experiment:
    """With weight decay."""
    return replace(experiment, optimizer=Decayed(experiment.optimizer))


@dataclass(frozen=True)
class ByAdam:
    """Adam, over the parameters and at the learning rate of what ``make`` makes."""

    make: Callable[[Any], Any]

    def __call__(self, model: Any) -> Any:
        return _each(self.make(model), _adam)


def _adam(optimizer: Optimizer) -> Optimizer:
    kept = [{"params": held["params"], "lr": held["lr"]} for held in optimizer.param_groups]
    return torch.optim.Adam(kept)


def by_adam(experiment: Experiment, plan: Plan) -> Experiment:
    """With Adam, unless its own optimizer counts."""
    own = Setting(experiment, plan).optimizers
    if all(corrects(one) for one in own):
        return experiment
    return replace(experiment, optimizer=ByAdam(experiment.optimizer))


# -- where they show


def corrects(optimizer: Optimizer) -> bool:
    """It corrects the bias of its moments by the number of updates."""
    return "betas" in optimizer.defaults


def decays(setting: Setting) -> str:
    groups = [held for one in setting.optimizers for held in one.param_groups]
    if any(held.get("weight_decay", 0.0) for held in groups):
        return ""
    return "the experiment does not decay its weights"


def corrects_bias(setting: Setting) -> str:
    if setting.precision.name == "fp16":
        return "Adam's eps is 0 in float16"
    if all(corrects(one) for one in setting.optimizers):
        return ""
    return "the experiment's optimizer does not count its updates"


FAULTS = (
    Planted(
        "opt.update_per_microbatch",
        Cause.UPDATE_PER_MICROBATCH,
        "GaLore #78",
        update_per_microbatch,
        conditions=(accumulates,),
    ),
    Planted(
        "opt.decay_per_microbatch",
        Cause.DECAY_PER_MICROBATCH,
        "Keras #19990",
        decay_per_microbatch,
        conditions=(accumulates, decays),
        shaped=decayed,
    ),
    Planted(
        "opt.counter_frozen",
        Cause.COUNTER_FROZEN,
        "OLMo-core #309",
        counter_frozen,
        conditions=(corrects_bias,),
        shaped=by_adam,
    ),
)
