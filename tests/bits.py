"""A right loop through DistributedDataParallel, and whether the replay gives its bits."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import equivtest
from equivtest import Experiment, Loss, Plan, Rank


class Net(nn.Module):
    """Three layers; the middle one is used where the batch's first number is positive."""

    def __init__(self, sometimes: bool) -> None:
        super().__init__()
        self.sometimes = sometimes
        self.first, self.middle, self.last = nn.Linear(5, 31), nn.Linear(31, 31), nn.Linear(31, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if not self.sometimes or float(x[0, 0]) > 0:
            hidden = self.middle(hidden).tanh()
        return self.last(hidden)


def squares(model: nn.Module, batch: Tensor) -> Loss:
    return Loss((model(batch) ** 2).sum(), count=len(batch))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


def every_microbatch(rank: Rank) -> None:
    """Reduces with every backward, and keeps the gradients' memory between updates."""
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch)
            objective = loss.total / group.count * rank.D
            (rank.scaler.scale(objective) if rank.scaler else objective).backward()
        if rank.scaler is None:
            rank.optimizer.step()
        else:
            rank.scaler.step(rank.optimizer)
            rank.scaler.update()
        rank.optimizer.zero_grad(set_to_none=False)


def own_wrapper(rank: Rank) -> None:
    """Wraps the model itself, past the one that it was handed."""
    model = DistributedDataParallel(rank.module, bucket_cap_mb=0.004)
    for group in rank.groups:
        for batch in group:
            (rank.loss(model, batch).total / group.count * rank.D).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


DATA = list(torch.randn(24, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64))


def bits_equal(D: int, precision: str, loop=None, sometimes: bool = False, **how) -> list[bool]:
    """By update, with buckets of about 1,000 float32 where ``how`` says nothing else."""
    experiment = Experiment(
        model=partial(Net, sometimes), data=DATA, loss=squares, optimizer=sgd, updates=3
    )
    wrap = partial(DistributedDataParallel, **{"bucket_cap_mb": 0.004, **how})
    plan = Plan(1, 2 if D < 8 else 1, D)
    verdict = equivtest.check(experiment, plan, precision=precision, loop=loop, wrap=wrap)
    assert verdict.failure is None, verdict.explain()
    return [row.replay_bits_equal for row in verdict.updates]
