"""Small experiments for faults that records show, and what their loops share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from equivtest import Experiment, Group, Loss, Plan, Rank, Verdict, check
from equivtest.arms import Case, candidate
from equivtest.arms.case import groups_of
from equivtest.loops import advance, update
from equivtest.observe.trace import Trace
from equivtest.pool import Shared, current_pool
from equivtest.precision import precision as precision_called

PLAN = Plan(2, 3, 2)
"""m, A and D apart."""

EQUAL = Plan(2, 2, 2)
"""A = D: a scalar does not tell them apart."""

PRECISIONS = ("fp64", "fp32", "bf16-mixed")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _examples(n: int = 12) -> list[dict[str, Tensor]]:
    """Regressions of which some elements do not count: an example has 2 or 1 of them."""
    drawn = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(3, generator=drawn),
            "y": torch.randn(2, generator=drawn),
            "counts": torch.tensor([1.0, float(i % 3 > 0)]),
        }
        for i in range(n)
    ]


def squared(model: Any, batch: dict[str, Tensor]) -> Loss:
    off = (model(batch["x"].to(_dtype(model))) - batch["y"]).square() * batch["counts"]
    return Loss(total=off.sum(), count=batch["counts"].sum())


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def experiment(**more: Any) -> Experiment:
    given: dict[str, Any] = {
        "model": Net,
        "data": _examples(),
        "loss": squared,
        "count": lambda batch: batch["counts"].sum(),
        "optimizer": adamw,
        "updates": 3,
        "last_group": "process",
        "scaler": lambda device: torch.amp.GradScaler(device, init_scale=2.0**8),
    }
    return Experiment(**{**given, **more})


def microbatches(rank: Rank, group: Group) -> Iterator[int]:
    """Forward and backward of each microbatch, as the recipe has them; yields after each."""
    for k, batch in enumerate(group):
        last = k == len(group) - 1
        with contextlib.nullcontext() if last else rank.model.no_sync():
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            objective = loss.total / group.count * rank.D  # type: ignore[union-attr]
            (rank.scaler.scale(objective) if rank.scaler else objective).backward()
        yield k


def accumulated(rank: Rank, group: Group) -> None:
    for _ in microbatches(rank, group):
        pass


def finish(rank: Rank) -> bool:
    """Update, schedule, average, clear; whether the update was applied."""
    applied = update(rank, [rank.optimizer])
    advance(rank, "attempted")
    if applied:
        advance(rank, "applied")
        if rank.average is not None:
            rank.average.update_parameters(rank.module)
    rank.optimizer.zero_grad()
    return applied


def causes(
    given: Experiment,
    plan: Plan,
    loop: Callable[[Rank], None] | None,
    precision: str = "fp64",
    **how: Any,
) -> set[str]:
    return set(verdict(given, plan, loop, precision, **how).causes)


def verdict(
    given: Experiment,
    plan: Plan,
    loop: Callable[[Rank], None] | None,
    precision: str = "fp64",
    **how: Any,
) -> Verdict:
    return check(given, plan, precision=precision, loop=loop, **how)


def traces(
    given: Experiment, plan: Plan, loop: Callable[[Rank], None] | None, precision: str = "fp64"
) -> list[Trace]:
    """What each rank left."""
    shared = Shared(given)
    groups = groups_of(given, plan)
    case = Case(plan, precision_called(precision), groups, loop, None, "cpu", shared.digest)
    return current_pool().run(candidate, shared, case, D=plan.D)
