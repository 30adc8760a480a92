"""A loop watched in every process of a real process group, on scalars and a weight of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import a_rank
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from watching import numbers, observed

from equivtest import Rank
from equivtest.observe import Trace
from equivtest.pool import Seat, current_pool

Numbers = Sequence[Sequence[float]]


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 2), nn.Linear(2, 1))


def _watched(
    seat: Seat,
    loop: Callable[[Rank], None],
    updates: Sequence[Numbers],
    build: Callable[[], nn.Module],
    wrap: Callable[[nn.Module], Any],
    how: dict[str, Any],
) -> Trace:
    module = build()
    rank = a_rank(
        module,
        model=wrap(module),
        D=seat.size,
        dp_rank=seat.rank,
        dp_group=seat.group,
        optimizer=torch.optim.SGD(module.parameters(), lr=0.125),
        **how,
    )
    return observed(loop, rank, numbers(*updates))


def watch(
    loop: Callable[[Rank], None],
    *updates: Numbers,
    D: int = 2,
    build: Callable[[], nn.Module] = two_layers,
    wrap: Callable[[nn.Module], Any] = DistributedDataParallel,
    **how: Any,
) -> Trace:
    """What rank 0 leaves; all ranks have the same numbers, and leave the same but for theirs."""
    given = updates or ([[1.0], [2.0]],)
    traces = current_pool().run(_watched, loop, given, build, wrap, how, D=D)
    return traces[0]
