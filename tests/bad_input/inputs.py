"""A good experiment, bad changes to it, and what a user reads of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

import equivtest
from equivtest import Experiment, Loss, Plan, Verdict

PLAN = Plan(2, 2, 2)

_draw = torch.Generator().manual_seed(0)
DATA = [(torch.randn(3, generator=_draw), torch.randn(1, generator=_draw)) for _ in range(8)]


def squared_error(model: nn.Module, batch: Any) -> Loss:
    x, y = batch
    return Loss((model(x) - y).square().sum(), count=len(y))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def own_loop(rank: equivtest.Rank) -> None:
    """A right loop with a loss of its own: the experiment's is not called in it."""
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for x, y in group:
            ((rank.model(x) - y).square().sum() / group.count * rank.D).backward()
        rank.optimizer.step()


def an_experiment(**changes: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": lambda: nn.Linear(3, 1),
        "data": DATA,
        "loss": squared_error,
        "count": lambda batch: len(batch[1]),
        "optimizer": sgd,
    }
    return Experiment(**{**given, **changes})


GOOD = an_experiment()


def check(experiment: Experiment, plan: Plan = PLAN, **how: Any) -> Verdict:
    return equivtest.check(experiment, plan, **{"precision": "fp64", "timeout_s": 60.0, **how})


def stable(verdict: Verdict) -> Verdict:
    """Without what one run may have otherwise than another: the time that it took."""
    return replace(verdict, duration_s=0.0)


def told(experiment: Experiment, plan: Plan = PLAN, **how: Any) -> str:
    """The first line of the error, which must say it all, after the case's name."""
    verdict = check(experiment, plan, **how)
    assert verdict.status == "error", verdict.explain()
    first = verdict.explain().splitlines()[0]
    head, _, text = first.partition(f"{verdict.card.plan} in {verdict.card.precision}: ")
    assert head == "error: "
    assert not re.search(r"rank \d|all \d ranks|single process", text), text  # nobody else's fault
    return text
