"""A gradient that is not finite is traced to what made it so, and counts as one cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diagnose.ragged import COUNTS, examples, ragged
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from equivtest import Experiment, Loss, Plan, Rank, check
from equivtest.faults.hooks import in_half
from equivtest.faults.pieces import backward, finish, reducing_last, right

PLANS = (Plan(1, 3, 2), Plan(1, 6, 1))


def masked(model: Any, batch: dict[str, Tensor]) -> Loss:
    """Losses times a mask: 0/0 reaches every gradient, which ``ignore_index`` would stop."""
    mask = batch["target"] != -100
    scores = model(batch["x"]).flatten(0, 1)
    losses = F.cross_entropy(scores, batch["target"].clamp(min=0).flatten(), reduction="none")
    return Loss(total=(losses * mask.flatten()).sum(), count=mask.sum())


def half_empty(**more: Any) -> Experiment:
    """Example 2 of 24 has no supervised element."""
    data = examples((*COUNTS[:2], 0, *COUNTS[3:]))
    return ragged(data=data, loss=masked, **more)


@dataclass(frozen=True)
class ByItsCount:
    """Means by microbatch weighted by their counts: right, but for 0/0 where ``least`` is 0."""

    least: int = 0

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                with reducing_last(rank, group, k):
                    with rank.autocast():
                        loss = rank.loss(rank.model, batch)
                    mean = loss.total / loss.count.clamp(min=self.least)
                    backward(rank, mean * (float(loss.count) / group.count * rank.D))
            finish(rank)


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
def test_a_count_of_zero_is_named_and_nothing_that_follows(plan: Plan, precision: str) -> None:
    """Also where a scaler skips the update: no scale helps."""
    expect = "norm.empty_microbatch"
    verdict = check(half_empty(), plan, precision=precision, loop=ByItsCount(), expect=expect)
    assert (verdict.status, verdict.causes) == ("fault", (expect,)), verdict.explain()
    assert verdict.passed
    assert "microbatch 2 of replica 0 in update 0" in verdict.findings[0].text


@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_at_least_one_is_right(precision: str) -> None:
    verdict = check(half_empty(), PLANS[0], precision=precision, loop=ByItsCount(least=1))
    assert verdict.status == "equivalent", verdict.explain()


def infinite_once(rank: Rank) -> None:
    """A microbatch with supervised elements whose loss is not finite."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                objective = right(rank, group, batch)
                if (group.update, k, rank.dp_rank) == (0, 1, 0):
                    objective = objective * float("inf")
                backward(rank, objective)
        finish(rank)


def test_another_gradient_that_is_not_finite_keeps_its_name_and_says_where() -> None:
    expect = "prec.nonfinite"
    verdict = check(ragged(), Plan(2, 3, 2), loop=infinite_once, expect=expect)
    assert verdict.causes == (expect,)
    assert verdict.passed, verdict.explain()  # the update after it says nothing of its own
    assert "microbatch 1 on replica 0" in verdict.findings[0].text


# -- float16's range


def wrapped(module: nn.Module) -> nn.Module:
    wrapper = DistributedDataParallel(module)
    wrapper.register_comm_hook(dist.group.WORLD, in_half)  # type: ignore[arg-type]
    return wrapper


def linear(*gradients: float) -> Experiment:
    """One weight for each example, whose gradient is what is given for it."""

    def by_element(model: Any, batch: dict[str, Tensor]) -> Loss:
        return Loss(total=model(batch["g"]).sum(), count=torch.tensor(len(batch["g"])))

    return Experiment(
        model=lambda: nn.Linear(1, 1, bias=False),
        data=[{"g": torch.tensor([g])} for g in gradients],
        loss=by_element,
        count=lambda batch: len(batch["g"]),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        updates=1,
    )


@pytest.mark.parametrize("pair", [(60000.0, 60000.0), (1e-8, 2e-8)])
def test_what_float16_cannot_hold_is_named(pair: tuple[float, float]) -> None:
    """60000 + 60000 is inf, and 1e-8 and 2e-8 are 0: its range ends at 65504 and 2**-25."""
    verdict = check(linear(*pair), Plan(1, 1, 2), wrap=wrapped)
    assert verdict.causes == ("hook.fp16_range",), verdict.explain()


def test_what_float16_holds_is_right() -> None:
    """300 and 500 are float16 numbers, and so is their sum."""
    assert check(linear(300.0, 500.0), Plan(1, 1, 2), wrap=wrapped).status == "equivalent"


def test_a_ring_leaves_float16s_range_or_not_with_where_it_begins() -> None:
    """60000 and 60000 and -60000 are 60000 in float16, or inf if the first two meet first."""
    told = set()
    for at in range(3):
        given = [60000.0, 60000.0, 60000.0]
        given[at] = -60000.0
        verdict = check(linear(*given), Plan(1, 1, 3), wrap=wrapped)
        told.add((str(verdict.status), verdict.causes))
    assert told == {("equivalent", ()), ("fault", ("hook.fp16_range",))}
