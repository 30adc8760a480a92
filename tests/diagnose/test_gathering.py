"""Contrastive losses over features gathered from all replicas: right ones, and two mistakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.compare.verdict import Verdict
from equivtest.loops import update

GENERATOR = torch.Generator().manual_seed(3)


class Crossing(torch.autograd.Function):
    """All-gather whose backward adds up what every replica has for one's features."""

    @staticmethod
    def forward(ctx, own: Tensor, rank: Rank) -> Tensor:
        ctx.rank = rank
        parts = [torch.empty_like(own) for _ in range(rank.D)]
        dist.all_gather(parts, own.contiguous(), group=rank.dp_group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        rank = ctx.rank
        whole = gradient.contiguous().clone()
        dist.all_reduce(whole, group=rank.dp_group)
        return whole.chunk(rank.D)[rank.dp_rank], None


def with_gradient(own: Tensor, rank: Rank) -> Tensor:
    return Crossing.apply(own, rank)


def own_put_back(own: Tensor, rank: Rank) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(rank.D)]
    dist.all_gather(parts, own.detach(), group=rank.dp_group)
    parts[rank.dp_rank] = own
    return torch.cat(parts)


Gather = Callable[[Tensor, Rank], Tensor]
Objective = Callable[..., Tensor]


class Pairs(nn.Module):
    """Two encoders in parallel and a temperature behind the gather."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(3, 4), nn.Linear(3, 4)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.image(pairs[:, 0]), self.text(pairs[:, 1]), self.scale


def contrast(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits = scale * F.normalize(image, dim=1) @ F.normalize(text, dim=1).T
    own = torch.arange(len(image))
    return sum(F.cross_entropy(x, own, reduction="sum") for x in (logits, logits.T))


class Toy(nn.Module):
    """A feature ``w x`` and a head: the loss is half the head times the square of their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.head = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.w * x, self.head


def squared(features: Tensor, head: Tensor) -> Tensor:
    return head * features.sum() ** 2 / 2


def an_experiment(
    model: Callable[[], nn.Module], objective: Objective, data: list[Tensor], **changed: object
) -> Experiment:
    given: dict[str, object] = {
        "model": model,
        "data": data,
        "loss": lambda model, batch: Loss(objective(*model(batch)), len(batch)),
        "count": len,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "updates": 2,
        "last_group": "drop",
    }
    return Experiment(**{**given, **changed})  # type: ignore[arg-type]


PAIRS = an_experiment(Pairs, contrast, [torch.randn(2, 3, generator=GENERATOR) for _ in range(32)])
TOY = an_experiment(Toy, squared, [torch.tensor(0.5), torch.tensor(1.5)], updates=1)


def loop(gather: Gather, objective: Objective, times: float = 1.0) -> Callable[[Rank], None]:
    """A loss over the features of all replicas, the same on each of them."""

    def run(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                with nullcontext() if k == len(group) - 1 else rank.model.no_sync():
                    with rank.autocast():
                        *features, head = rank.model(batch)
                        total = objective(*(gather(one, rank) for one in features), head)
                    (total / group.count * times).backward()
            update(rank, [rank.optimizer])
            rank.optimizer.zero_grad()

    return run


def held(verdict: Verdict) -> dict[str, float]:
    """Norm of each gradient in the first update."""
    return {row.tensor: row.norm for row in verdict.rows if row.update == 0}


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize("plan", [Plan(4, 1, 2), Plan(3, 1, 3)], ids=str)
def test_a_right_gather_has_the_large_batchs_gradient_itself(plan: Plan, precision: str) -> None:
    verdict = check(PAIRS, plan, precision=precision, loop=loop(with_gradient, contrast))
    assert verdict.status == "equivalent", verdict.explain()
    assert any("the large batch itself" in note for note in verdict.notes)


def test_a_right_gather_in_rounds_is_beside_the_large_batch_for_the_source_alone() -> None:
    verdict = check(PAIRS, Plan(4, 2, 2), precision="fp64", loop=loop(with_gradient, contrast))
    assert list(verdict.causes) == ["source.coupling"], verdict.explain()
    assert any("taken together" in note for note in verdict.notes)


def test_the_toy_of_the_field() -> None:
    """Right 2.0: half of (0.5 + 1.5) squared; 1.0 without the gradient, 4.0 with it twice."""
    plan = Plan(1, 1, 2)
    right = check(TOY, plan, precision="fp64", loop=loop(with_gradient, squared))
    assert right.status == "equivalent", right.explain()
    assert held(right) == {"w": 2.0, "head": 1.0}
    alone = check(TOY, plan, precision="fp64", loop=loop(own_put_back, squared))
    assert held(alone) == {"w": 1.0, "head": 1.0}
    assert list(alone.causes) == ["loss.gather_no_grad"], alone.explain()
    double = check(TOY, plan, precision="fp64", loop=loop(with_gradient, squared, times=2.0))
    assert held(double) == {"w": 4.0, "head": 2.0}
    assert list(double.causes) == ["loss.gather_double"], double.explain()


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed"])
@pytest.mark.parametrize(
    ("gather", "times", "cause"),
    [(own_put_back, 1.0, "loss.gather_no_grad"), (with_gradient, 3.0, "loss.gather_double")],
)
def test_a_gather_that_is_wrong_is_named(
    gather: Gather, times: float, cause: str, precision: str
) -> None:
    verdict = check(
        PAIRS, Plan(4, 1, 3), precision=precision, loop=loop(gather, contrast, times=times)
    )
    assert list(verdict.causes) == [cause], verdict.explain()


def test_in_rounds_it_is_named_beside_the_source() -> None:
    verdict = check(PAIRS, Plan(4, 2, 2), precision="fp64", loop=loop(own_put_back, contrast))
    assert list(verdict.causes) == ["loss.gather_no_grad", "source.coupling"], verdict.explain()


def test_another_factor_keeps_its_general_name() -> None:
    verdict = check(PAIRS, Plan(4, 1, 2), precision="fp64", loop=loop(with_gradient, contrast, 1.5))
    assert "differs.gradient" in verdict.causes
    # The features are right and the temperature counts D times: no gradient crossed.
    verdict = check(PAIRS, Plan(4, 1, 2), precision="fp64", loop=loop(own_put_back, contrast, 2.0))
    assert list(verdict.causes) == ["differs.gradient"], verdict.explain()


def test_a_loop_that_never_gathers_is_left_to_the_split() -> None:
    verdict = check(PAIRS, Plan(4, 1, 2), precision="fp64")
    assert list(verdict.causes) == ["source.coupling"], verdict.explain()
