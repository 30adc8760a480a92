"""The toy experiments whose numbers name a fault, and what their loops leave, read raw.

T: D=2, A=3, supervised counts 1, 3, 2 | 2, 6, 1, N=15, loss of an element ``g s + w[r, k]``. ``s``
is shared by all, ``w`` has one coordinate a microbatch and so reads out the weight of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.arms import Case, candidate
from equivtest.arms.case import groups_of
from equivtest.observe.trace import Trace
from equivtest.pool import Shared, current_pool
from equivtest.precision import precision


class Readout(nn.Module):
    """A shared scalar, and a coordinate for each microbatch of each replica."""

    def __init__(self, microbatches: int) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.zeros(()))
        self.w = nn.Parameter(torch.zeros(microbatches))

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Loss by example, summed over its elements."""
        return batch["count"] * (batch["g"] * self.s + self.w[batch["where"]])


def per_element(model: Any, batch: dict[str, Tensor]) -> Loss:
    return Loss(total=model(batch).sum(), count=batch["count"].sum())


def readout(counts: Sequence[float], gradients: Sequence[float], **more: Any) -> Experiment:
    """One example a microbatch: its count of supervised elements and their gradient."""
    given: dict[str, Any] = {
        "model": lambda: Readout(len(counts)),
        "data": [
            {"count": torch.tensor(n), "g": torch.tensor(x), "where": torch.tensor(i)}
            for i, (n, x) in enumerate(zip(counts, gradients, strict=True))
        ],
        "loss": per_element,
        "count": lambda batch: batch["count"].sum(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "updates": 1,
    }
    return Experiment(**{**given, **more})


T_COUNTS = (1.0, 3.0, 2.0, 2.0, 6.0, 1.0)
T_GRADIENTS = (8.0, 2.0, -1.0, 1.0, -1.0, 4.0)
PROBE_T = readout(T_COUNTS, T_GRADIENTS)
PLAN_T = Plan(1, 3, 2)
PROBE_T0 = readout(T_COUNTS[:3], T_GRADIENTS[:3])
PLAN_T0 = Plan(1, 3, 1)


class Vector(nn.Module):
    """A linear loss: the gradient of an example is the example."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.v


def linear(*rows: Sequence[float], **more: Any) -> Experiment:
    """One example a row; its gradient is the row."""
    given: dict[str, Any] = {
        "model": lambda: Vector(len(rows[0])),
        "data": [torch.tensor(list(row)) for row in rows],
        "loss": lambda model, batch: Loss(model(batch).sum(), count=len(batch)),
        "count": len,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        "updates": 1,
    }
    return Experiment(**{**given, **more})


PROBE_C = linear([3.0, 0.0], [0.0, 4.0], clip_norm=1.0)
"""Microbatch gradients, over A=2: (1.5, 0) and (0, 2), bound 1."""


def linear_decay(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda calls: 1 - calls / 12)


PROBE_U = replace(
    linear(*([[1.0, 2.0], [0.5, 0.25]] * 9)),
    scheduler=linear_decay,
    updates=3,
)
"""Linear decay over 12 updates from 1.0, to run with A=3, D=2: after 3 updates 0.75."""


def traces(
    experiment: Experiment,
    plan: Plan,
    loop: Callable[[Rank], None] | None = None,
    wrap: Any = None,
    *,
    in_precision: str = "fp64",
) -> list[Trace]:
    """What each rank left, as it was observed: nothing is judged."""
    shared = Shared(experiment)
    groups = groups_of(experiment, plan)
    case = Case(plan, precision(in_precision), groups, loop, wrap, "cpu", shared.digest)
    return current_pool().run(candidate, shared, case, D=plan.D)


def gradients(
    experiment: Experiment,
    plan: Plan,
    loop: Callable[[Rank], None] | None = None,
    wrap: Any = None,
    *,
    update: int = 0,
    clipped: bool = False,
    in_precision: str = "fp64",
) -> list[dict[str, list[float]]]:
    """One update's gradient on each rank, flat: after reduction, before clip or after it."""
    found = []
    for trace in traces(experiment, plan, loop, wrap, in_precision=in_precision):
        one = trace.updates[update]
        held = one.clipped if clipped else one.gradient
        found.append({name: g.reshape(-1).tolist() for name, g in held.items() if g is not None})
    return found
