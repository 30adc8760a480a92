"""Loops with a loader of their own, and the experiments that they train."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from equivtest import Experiment, Loss, Rank
from equivtest.loops import several


def points(n: int = 24) -> list[dict[str, Tensor]]:
    """Examples of four features and a target, all different."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=g)
    return [{"x": row, "y": row.sum().sin()} for row in x]


def pairs(n: int = 24) -> list[tuple[Tensor, Tensor]]:
    return [(one["x"], one["y"]) for one in points(n)]


def lines(n: int = 24) -> list[Tensor]:
    """Ragged lines of tokens, none of them the padding."""
    g = torch.Generator().manual_seed(6)
    return [torch.randint(1, 11, (3 + i % 5,), generator=g) for i in range(n)]


def padded(examples: Sequence[Tensor]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(examples), batch_first=True)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:, 0]


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens).tanh())


def squared(model: Any, batch: Any) -> Loss:
    x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
    return Loss((model(x) - y).square().sum(), count=len(y))


def next_token(model: Any, tokens: Tensor) -> Loss:
    logits, target = model(tokens[:, :-1]), tokens[:, 1:]
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum"
    )
    return Loss(total, count=(target != 0).sum())


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def experiment(data: Sequence[Any], **changes: Any) -> Experiment:
    """Of regression, or of lines of tokens."""
    tokens = isinstance(data[0], Tensor)
    given: dict[str, Any] = {
        "model": Tokens if tokens else Regression,
        "data": data,
        "loss": next_token if tokens else squared,
        "optimizer": sgd,
        "collate": padded if tokens else None,
        "updates": 3,
    }
    return Experiment(**{**given, **changes})


# -- pieces of loops


def held_as(rank: Rank, batch: Any) -> Any:
    """The batch with floats as the model holds them."""
    dtype = next(rank.module.parameters()).dtype

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return torch.utils._pytree.tree_map(cast, batch)


def collating(rank: Rank) -> Any:
    return padded if isinstance(rank.dataset[0], Tensor) else None


def update_on(rank: Rank, group: Sequence[Any]) -> None:
    """One right update on the group's batches: the count is summed over microbatches and ranks."""
    batches = [held_as(rank, batch) for batch in group]
    with torch.no_grad():
        counts = [float(rank.loss(rank.module, batch).count) for batch in batches]
    count = torch.tensor([sum(counts)], dtype=torch.float64)
    dist.all_reduce(count, group=rank.dp_group)
    accumulate(rank, batches, float(count))
    finish(rank)


def accumulate(rank: Rank, batches: Sequence[Any], count: float) -> None:
    """Backward of each batch, reduced with the last."""
    for k, batch in enumerate(batches):
        last = k == len(batches) - 1
        with contextlib.nullcontext() if last else rank.model.no_sync():
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            (loss.total / count * rank.D).backward()


def finish(rank: Rank) -> None:
    for optimizer in several(rank.optimizer):
        optimizer.step()
        optimizer.zero_grad()


def windows(batches: Iterable[Any], A: int) -> Iterator[list[Any]]:
    """Every ``A`` batches, and what is left."""
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if len(held) == A:
            yield held
            held = []
    if held:
        yield held


def with_sampler(
    m: int, A: int, *, epochs: int = 1, workers: int = 0, set_epoch: bool = True, **sampling: Any
) -> Callable[[Rank], None]:
    """The loop that people write: a DistributedSampler, and a window of A batches an update."""

    def loop(rank: Rank) -> None:
        sampler: Any = DistributedSampler(
            rank.dataset, num_replicas=rank.D, rank=rank.dp_rank, **{"shuffle": False, **sampling}
        )
        loader = DataLoader(
            rank.dataset,
            batch_size=m,
            sampler=sampler,
            collate_fn=collating(rank),
            num_workers=workers,
        )
        for epoch in range(epochs):
            if set_epoch:
                sampler.set_epoch(epoch)
            for group in windows(loader, A):
                update_on(rank, group)

    return loop
