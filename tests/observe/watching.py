"""A loop watched in this process, without any process group."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from equivtest import Group, Rank
from equivtest.observe import Trace
from equivtest.observe.observer import Observer

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
