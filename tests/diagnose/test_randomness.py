"""Random numbers that replicas or microbatches share, planted by seeding where nothing asks it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.loops import accumulate, normalised, update

GENERATOR = torch.Generator().manual_seed(1)
DATA = [torch.randn(3, generator=GENERATOR) for _ in range(24)]


class Dropped(nn.Module):
    """Two layers with a mask between them, drawn from torch's generator or from numpy's."""

    def __init__(self, numpy: bool = False, p: float = 0.5) -> None:
        super().__init__()
        self.first, self.last, self.numpy, self.p = nn.Linear(3, 4), nn.Linear(4, 2), numpy, p

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.numpy:
            hidden = hidden * torch.from_numpy(np.random.rand(*hidden.shape) < self.p).to(hidden)
        return self.last(F.dropout(hidden, 0.0 if self.numpy else self.p, self.training))


def an_experiment(model: Callable[[], nn.Module] = Dropped, updates: int = 2) -> Experiment:
    return Experiment(
        model=model,
        data=DATA,
        loss=lambda model, batch: Loss(model(batch).square().to(torch.float64).sum(), len(batch)),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        updates=updates,
        last_group="drop",
    )


def seeding(at: str, seed: Callable[[Rank], int]) -> Callable[[Rank], None]:
    """A loop that is right but for a seed once, in every group or before every forward."""

    def plant(rank: Rank, now: str) -> None:
        if at == now:
            torch.manual_seed(seed(rank))

    def loop(rank: Rank) -> None:
        plant(rank, "once")
        for group in rank.groups:
            plant(rank, "group")
            for batch in group:
                plant(rank, "forward")
                with rank.autocast():
                    loss = rank.loss(rank.model, batch)
                (normalised(loss, group) * rank.D).backward()
            update(rank, [rank.optimizer])
            rank.optimizer.zero_grad()

    return loop


def alike(_: Rank) -> int:
    return 7


def apart(rank: Rank) -> int:
    return 7 + rank.dp_rank


REPLICAS, MICROBATCHES = "rng.same_mask_across_replicas", "rng.same_mask_across_microbatches"


@pytest.mark.parametrize(
    ("at", "seed", "plan", "cause"),
    [
        ("once", alike, Plan(2, 2, 2), REPLICAS),  # transformers #31412
        ("once", alike, Plan(2, 1, 3), REPLICAS),
        ("forward", alike, Plan(2, 2, 2), REPLICAS),  # one mistake in both directions, said once
        ("forward", alike, Plan(2, 3, 1), MICROBATCHES),
        ("forward", apart, Plan(2, 2, 2), MICROBATCHES),
        ("group", apart, Plan(2, 1, 2), MICROBATCHES),  # from one update to the next
        ("group", apart, Plan(2, 2, 2), MICROBATCHES),
    ],
)
def test_the_same_numbers_twice_are_named_beside_the_source(
    at: str, seed: Callable[[Rank], int], plan: Plan, cause: str
) -> None:
    verdict = check(an_experiment(), plan, precision="bf16-mixed", loop=seeding(at, seed))
    assert verdict.status == "fault", verdict.explain()
    assert list(verdict.causes) == [cause, "source.dropout"]
    assert verdict.sources["source.dropout"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(
    ("at", "seed", "plan"),
    [
        ("never", alike, Plan(2, 2, 2)),  # as equivtest seeds the replicas
        ("once", apart, Plan(2, 2, 2)),
        ("once", alike, Plan(2, 3, 1)),  # one replica has nobody to share with
    ],
)
def test_numbers_of_their_own_are_left_alone(
    at: str, seed: Callable[[Rank], int], plan: Plan
) -> None:
    verdict = check(an_experiment(), plan, precision="fp64", loop=seeding(at, seed))
    assert list(verdict.causes) == ["source.dropout"], verdict.explain()


def test_a_seed_of_a_forward_that_draws_nothing_is_left_alone() -> None:
    dry = an_experiment(lambda: Dropped(p=0.0))
    verdict = check(dry, Plan(2, 2, 2), precision="fp64", loop=seeding("forward", alike))
    assert verdict.status == "equivalent", verdict.explain()


def test_numbers_count_of_the_generator_that_they_are_drawn_from() -> None:
    made = an_experiment(lambda: Dropped(numpy=True))
    # torch's generators are alike, and the masks come from numpy's, which are not.
    assert (
        REPLICAS
        not in check(made, Plan(2, 2, 2), precision="fp64", loop=seeding("once", alike)).causes
    )

    def numpy_alike(rank: Rank) -> None:
        np.random.seed(3)
        accumulate(rank)

    assert REPLICAS in check(made, Plan(2, 2, 2), precision="fp64", loop=numpy_alike).causes
