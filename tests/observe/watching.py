"""A loop watched in this process, without any process group."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from equivtest import Group, Loss, Rank
from equivtest.observe import Trace
from equivtest.observe.observer import Observer


class Bare(nn.Module):
    """A wrapper that reduces nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


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
        "_autocast": contextlib.nullcontext,
    }
    return Rank(**{**given, **changes})


Updates = Sequence[Sequence[Tensor]]


def groups(updates: Updates, fetched: Callable[[Any, tuple[int, ...]], Any]) -> list[Group]:
    """Groups of microbatches; each example's id is its place in the whole."""
    made, first = [], 0
    for u, microbatches in enumerate(updates):
        ids = []
        for batch in microbatches:
            ids.append(tuple(range(first, first + len(batch))))
            first += len(batch)
        made.append(
            Group(
                lambda k, b=microbatches, i=ids: fetched(b[k].clone(), i[k]),
                count=sum(map(len, microbatches)),
                local_count=sum(map(len, microbatches)),
                examples=tuple(ids),
                update=u,
            )
        )
    return made


def observed(loop: Callable[[Rank], None], rank: Rank, updates: Updates) -> Trace:
    """What ``loop`` leaves when it is watched."""
    observer = Observer(rank, [len(u) for u in updates], lambda event: None)
    rank.groups = groups(updates, observer.fetched)
    with observer.watching():
        loop(rank)
    return observer.trace()


def unobserved(loop: Callable[[Rank], None], rank: Rank, updates: Updates) -> None:
    """The same loop with nobody watching."""
    rank.groups = groups(updates, lambda batch, ids: batch)
    loop(rank)


def numbers(*updates: Sequence[Sequence[float]]) -> list[list[Tensor]]:
    """Microbatches of one feature from plain numbers."""
    return [[torch.tensor(m).reshape(-1, 1) for m in u] for u in updates]
