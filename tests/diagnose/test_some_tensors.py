"""Faults that show in some parameters only: not reduced, or not cleared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.faults.accumulation import leak_between_optimizers
from equivtest.faults.pieces import accumulated, bare, finish
from equivtest.faults.synchronisation import finding_unused, param_replaced
from equivtest.loops import several, update

GENERATOR = torch.Generator().manual_seed(4)
DATA = [torch.randn(3, generator=GENERATOR) for _ in range(48)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def weighted(model: Any, batch: Tensor) -> Loss:
    """Examples count 1/2 or 3/2: microbatches have counts of their own."""
    weights = (batch[:, 0] > 0).double() + 0.5
    return Loss((model(batch).square().sum(1) * weights).sum(), weights.sum())


def one(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def two(model: Any) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": torch.optim.SGD(model.first.parameters(), lr=0.1),
        "last": torch.optim.Adam(model.last.parameters(), lr=0.01),
    }


def an_experiment(optimizer: Callable[[Any], Any] = one, updates: int = 3) -> Experiment:
    return Experiment(
        model=Net,
        data=DATA,
        loss=weighted,
        optimizer=optimizer,
        updates=updates,
        last_group="drop",
    )


def two_terms(model: Any, batch: Tensor) -> dict[str, Loss]:
    """Below float32 the terms' own gradients do not add up to that of one backward for both."""
    found = model(batch)
    return {
        "square": Loss(found.square().sum().double(), len(batch)),
        "positive": Loss(found[batch[:, 0] > 0].sum().double(), (batch[:, 0] > 0).sum()),
    }


def means(rank: Rank, loss: Loss, A: int) -> Tensor:
    return loss.total / loss.count / A


def loop(
    objective: Callable[[Rank, Loss, int], Tensor] | None = None,
    cleared: Callable[[Sequence[Any]], Sequence[Any]] = lambda optimizers: optimizers,
) -> Callable[[Rank], None]:
    """Right, but for another objective, or for what is cleared."""

    def run(rank: Rank) -> None:
        optimizers = several(rank.optimizer)
        for group in rank.groups:
            for k, batch in enumerate(group):
                with nullcontext() if k == len(group) - 1 else rank.model.no_sync():
                    with rank.autocast():
                        loss = rank.loss(rank.model, batch)
                    total = loss.total / group.count * rank.D
                    if objective is not None:
                        total = objective(rank, loss, len(group))
                    (rank.scaler.scale(total) if rank.scaler else total).backward()
            update(rank, optimizers)
            for optimizer in cleared(optimizers):
                optimizer.zero_grad()

    return run


def replaced(inner: Callable[[Rank], None]) -> Callable[[Rank], None]:
    """The first weight is assigned anew before the loop."""

    def run(rank: Rank) -> None:
        old = rank.module.first.weight
        new = rank.module.first.weight = nn.Parameter(old.detach().clone())
        for optimizer in several(rank.optimizer):
            for group in optimizer.param_groups:
                group["params"] = [new if p is old else p for p in group["params"]]
        inner(rank)

    return run


def by_hand(*left_out: str) -> Callable[[Rank], None]:
    """A sum over the replicas by hand, of all parameters but these."""

    def run(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                (rank.loss(rank.module, batch).total / group.count).backward()
            for name, parameter in rank.module.named_parameters():
                if name not in left_out:
                    dist.all_reduce(parameter.grad, group=rank.dp_group)
            finish(rank)

    return run


def ignoring(module: nn.Module) -> nn.Module:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["last.bias"])
    return DistributedDataParallel(module)


def last_only(optimizers: Sequence[Any]) -> Sequence[Any]:
    return optimizers[-1:]


REPLACED, UNREDUCED = "sync.param_replaced", "sync.some_unreduced"
LEAK, MEANS = "accum.leak_between_optimizers", "norm.mean_of_means_both"


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize(
    ("planted", "wrap", "optimizer", "causes"),
    [
        (param_replaced, finding_unused, one, [REPLACED]),
        (leak_between_optimizers, None, two, [LEAK]),
    ],
    ids=["replaced", "leak"],
)
def test_it_is_named_in_every_precision(
    planted: Any, wrap: Any, optimizer: Any, causes: list[str], precision: str
) -> None:
    verdict = check(
        an_experiment(optimizer), Plan(2, 2, 2), precision=precision, loop=planted, wrap=wrap
    )
    assert verdict.status == "fault"
    assert list(verdict.causes) == causes, verdict.explain()


@pytest.mark.parametrize("precision", ["fp64", "bf16-mixed"])
@pytest.mark.parametrize(
    ("planted", "wrap", "causes"),
    [(param_replaced, finding_unused, [REPLACED]), (leak_between_optimizers, None, [LEAK])],
    ids=["replaced", "leak"],
)
def test_it_is_named_with_a_loss_of_two_terms(
    planted: Any, wrap: Any, causes: list[str], precision: str
) -> None:
    made = replace(an_experiment(two), loss=two_terms)
    verdict = check(made, Plan(4, 2, 2), precision=precision, loop=planted, wrap=wrap)
    assert list(verdict.causes) == causes, verdict.explain()


@pytest.mark.parametrize(
    ("planted", "wrap", "optimizer", "causes"),
    [
        (by_hand("first.bias"), bare, one, {UNREDUCED}),
        (loop(), ignoring, one, {UNREDUCED}),
        (replaced(loop(means)), finding_unused, one, {REPLACED, MEANS}),
        (replaced(loop(cleared=last_only)), finding_unused, two, {REPLACED, LEAK}),
        (loop(means, last_only), None, two, {LEAK, MEANS}),
    ],
    ids=["by hand", "ignored", "replaced, means", "replaced, leak", "leak, means"],
)
def test_it_is_named_beside_another(
    planted: Any, wrap: Any, optimizer: Any, causes: set[str]
) -> None:
    verdict = check(
        an_experiment(optimizer), Plan(2, 2, 2), precision="fp64", loop=planted, wrap=wrap
    )
    assert set(verdict.causes) == causes, verdict.explain()


def test_a_bucket_that_waits_for_the_parameter_that_is_gone_reduces_nothing() -> None:
    """torch refuses the next forward; a case of one update ends before it."""
    made = an_experiment(updates=1)
    verdict = check(made, Plan(2, 2, 2), precision="fp64", loop=replaced(loop()))
    assert list(verdict.causes) == [REPLACED], verdict.explain()
    assert "3 more parameters wait" in verdict.findings[0].text


def test_one_optimizer_alone_is_stale() -> None:
    """Without another optimizer that was cleared it is no leak."""
    verdict = check(
        an_experiment(), Plan(2, 2, 2), precision="fp64", loop=loop(cleared=lambda _: ())
    )
    assert list(verdict.causes) == ["accum.stale_carryover"], verdict.explain()


@pytest.mark.parametrize(
    ("right", "wrap", "optimizer"),
    [
        (loop(), None, two),
        (loop(), finding_unused, one),
        (by_hand(), bare, two),
        (lambda rank: [(accumulated(rank, g), finish(rank)) for g in rank.groups], None, two),
    ],
)
def test_a_right_loop_is_left_alone(right: Any, wrap: Any, optimizer: Any) -> None:
    verdict = check(
        an_experiment(optimizer), Plan(2, 2, 2), precision="fp64", loop=right, wrap=wrap
    )
    assert verdict.status == "equivalent", verdict.explain()
