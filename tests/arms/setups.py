"""Tiny experiments and the arms on them, without any process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equivtest import Experiment, Loss
from equivtest.arms.bench import Bench
from equivtest.arms.oracle import Whole
from equivtest.arms.replay import Replay, Start, replay
from equivtest.batches import Batches
from equivtest.observe.trace import MicrobatchTrace, State
from equivtest.plan import GroupLayout


def an_experiment(
    model: Callable[[], nn.Module], data: Sequence[Any], loss: Callable[..., Any], **changes: Any
) -> Experiment:
    return Experiment(
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda module: torch.optim.SGD(module.parameters(), lr=0.1),
        **changes,
    )


def squared(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
    """Sum of squared residuals."""
    residual = model(batch["x"]) - batch["y"]
    return Loss((residual**2).sum(), count=len(residual))


def pairs(x: Sequence[Any], y: Sequence[Any]) -> list[dict[str, Tensor]]:
    return [
        {"x": torch.tensor(a, dtype=torch.float64), "y": torch.tensor(b, dtype=torch.float64)}
        for a, b in zip(x, y, strict=True)
    ]


def state_of(bench: Bench) -> State:
    return State(
        {n: p.detach().clone() for n, p in bench.module.named_parameters()}, bench.buffers()
    )


def whole(experiment: Experiment, dtype: torch.dtype = torch.float64, **how: Any) -> Whole:
    """All examples in one batch, each counting one supervised element."""
    bench = Bench(experiment, dtype)
    n = len(experiment.data)
    return Whole(
        bench, Batches(experiment, dtype), state_of(bench), tuple(range(n)), {"": float(n)}, **how
    )


def replayed(
    experiment: Experiment,
    ids: Sequence[Sequence[Sequence[int]]],
    seen: Sequence[Sequence[MicrobatchTrace]] | None = None,
    dtype: torch.dtype = torch.float64,
    *,
    buffers: Sequence[dict[str, Tensor]] | None = None,
    counts: dict[str, float] | None = None,
    **how: Any,
) -> Replay:
    """The microbatches ``ids`` by replica, each example counting one supervised element."""
    bench = Bench(experiment, dtype)
    group = GroupLayout(0, 0, tuple(tuple(map(tuple, replica)) for replica in ids))
    start = state_of(bench)
    return replay(
        bench,
        Batches(experiment, dtype),
        group,
        counts or {"": float(len(group.flat))},
        Start(start.parameters, tuple(buffers or [start.buffers] * len(ids))),
        seen,
        **how,
    )
