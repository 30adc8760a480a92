"""One mistake has its one name, and a number that anything gives has none."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diagnose.event_cases import (
    EQUAL,
    PLAN,
    PRECISIONS,
    accumulated,
    causes,
    experiment,
    finish,
    microbatches,
    momentum,
    verdict,
)
from diagnose.test_schedule import SCHEDULED
from diagnose.test_state import AVERAGED
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Experiment, Group, Loss, Plan, Rank
from equivtest.faults.pieces import averaged, bare, cleared, right, summed, updated
from equivtest.loops import accumulate

# -- one mistake, one name


def rate_by_microbatches(rank: Rank) -> None:
    """The loop works out the learning rate itself, by a counter of microbatches."""
    rank.scheduler, done = None, 0
    for group in rank.groups:
        for held in rank.optimizer.param_groups:
            held["lr"] = held["initial_lr"] * max(0.0, 1 - done / 12)
        for _ in microbatches(rank, group):
            done += 1
        finish(rank)


def test_a_rate_by_a_counter_of_microbatches_is_a_schedule_per_microbatch() -> None:
    assert causes(SCHEDULED, PLAN, rate_by_microbatches) == {"sched.per_microbatch"}


def updates_inside(rank: Rank) -> None:
    """Updates per microbatch, and the schedule per group as it is due."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for batch in group:
            right(rank, group, batch).backward()
            finish(rank)
        scheduler.step()


def test_updates_per_microbatch_have_a_schedule_that_moves() -> None:
    given = replace(SCHEDULED, scaler=None)
    assert causes(given, PLAN, updates_inside) == {"opt.update_per_microbatch"}


def over_both_sizes(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                (right(rank, group, batch) / rank.D / len(group)).backward()
        finish(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_a_loss_over_both_sizes_has_both_names(precision: str) -> None:
    both = {"norm.missing_world_size", "norm.double_accum_division"}
    assert causes(experiment(scaler=None), PLAN, over_both_sizes, precision) == both


def divided_by_hand(rank: Rank) -> None:
    """The wrapper averages, and the loop divides what it left by D once more."""
    for group in rank.groups:
        accumulated(rank, group)
        for parameter in rank.module.parameters():
            parameter.grad.div_(rank.D)
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_gradients_divided_once_more_are_no_other_loss(plan: Plan, precision: str) -> None:
    found = verdict(experiment(scaler=None), plan, divided_by_hand, precision)
    assert set(found.causes) == {"hook.double_division"}
    # Where A = D a probe plan tells that it is D, not A, that divides.
    assert not found.findings[0].alternatives


def first_unscaled(rank: Rank) -> None:
    """The scaler is forgotten for microbatch 0."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            last = k == len(group) - 1
            with contextlib.nullcontext() if last else rank.model.no_sync():
                with rank.autocast():
                    objective = right(rank, group, batch)
                (rank.scaler.scale(objective) if k else objective).backward()
        finish(rank)


def test_a_microbatch_without_the_scale_is_said_to_have_none() -> None:
    found = verdict(experiment(), PLAN, first_unscaled, "fp16-mixed")
    assert found.causes[0] == "amp.scale_changes_inside_group"
    assert "none, 256, 256 by microbatch" in found.findings[0].text, found.findings[0].text


def test_half_of_one_element_each_is_not_one_more_count() -> None:
    """A = 1 and an element an example: 1 / (1 + 1) is any half."""
    data = [torch.randn(3, generator=torch.Generator().manual_seed(i)) for i in range(12)]
    given = Experiment(
        model=lambda: nn.Linear(3, 1),
        data=data,
        loss=lambda model, batch: Loss(model(batch).square().sum(), count=len(batch)),
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        updates=2,
    )

    def halved(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                (right(rank, group, batch) * 0.5).backward()
            finish(rank)

    assert causes(given, Plan(2, 1, 3), halved) == {"differs.gradient"}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def next_token(model: nn.Module, lines: Tensor) -> Loss:
    total = F.cross_entropy(
        model(lines[:, :-1]).flatten(0, 1), lines[:, 1:].flatten(), reduction="sum"
    )
    return Loss(total, count=lines[:, 1:].numel())


def scaled(times: float) -> Callable[[Rank], None]:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    (right(rank, group, batch) * times).backward()
            finish(rank)

    return loop


@pytest.mark.parametrize(
    ("length", "times", "plan"),
    [
        (5, 2 / 3, PLAN),
        (5, 4 / 3, PLAN),
        (5, 0.4, PLAN),
        (5, 0.2, EQUAL),
        (3, 1 / 3, EQUAL),
        (3, 1 / 6, Plan(3, 4, 1)),
    ],
)
def test_any_number_is_a_product_and_has_no_name_for_that(
    length: int, times: float, plan: Plan
) -> None:
    """Lines of one length: means over anything are numbers."""
    drawn = torch.Generator().manual_seed(1)
    lines = [torch.randint(1, 20, (length,), generator=drawn) for _ in range(48)]
    given = Experiment(Tokens, lines, next_token, optimizer=momentum, updates=2)
    assert causes(given, plan, scaled(times)) == {"differs.gradient"}


def overlapping_halves(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            n = len(batch["x"])
            for first, end in ((0, n // 2 + 1), (n // 2, n)):
                part = {name: held[first:end] for name, held in batch.items()}
                right(rank, group, part).backward()
        averaged(rank)
        updated(rank)
        cleared(rank)


def test_rows_that_overlap_are_no_padding() -> None:
    """12 examples come out even over 2 replicas and in batches of 6."""
    found = causes(experiment(scaler=None), Plan(6, 1, 2), overlapping_halves, wrap=bare)
    assert found == {"differs.examples", "differs.counters"}


def calls(rank: Rank, after: Callable[[Group], int]) -> None:
    """So many calls on the average after the update of a group."""
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)
        for _ in range(after(group)):
            rank.average.update_parameters(rank.module)


def test_an_average_that_misses_one_update_does_not_never_move() -> None:
    missing = lambda rank: calls(rank, lambda group: int(group.update > 0))  # noqa: E731
    assert causes(AVERAGED, PLAN, missing) == {"differs.state"}


def test_two_calls_after_the_update_are_not_one_a_microbatch() -> None:
    twice = lambda rank: calls(rank, lambda group: 2)  # noqa: E731
    each = lambda rank: calls(rank, len)  # noqa: E731
    assert causes(AVERAGED, PLAN, twice) == {"differs.state"}
    assert causes(AVERAGED, PLAN, each) == {"state.ema_per_microbatch"}
    assert causes(AVERAGED, PLAN, lambda rank: calls(rank, lambda group: 3)) == {"differs.state"}
    assert causes(AVERAGED, Plan(2, 2, 3), twice) == {"differs.state"}
    # At A = 2 they are the same, and a probe plan with another A tells.
    assert causes(AVERAGED, EQUAL, twice) == {"differs.state"}
    assert causes(AVERAGED, EQUAL, each) == {"state.ema_per_microbatch"}


# -- what is said


def reporting_own_loss(times: float) -> Callable[[Rank], None]:
    """A loss of the loop's own, over the replicas, is reported ``times`` over."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            total = 0.0
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    off = rank.model(batch["x"].to(rank.module.first.weight.dtype)) - batch["y"]
                    share = (off.square() * batch["counts"]).sum() / group.count
                    (share * rank.D).backward()
                total += float(share)
            rank.report(summed(rank, total) * times)
            updated(rank)
            cleared(rank)

    return loop


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_a_loop_reports_of_a_loss_of_its_own_is_compared(precision: str) -> None:
    given = experiment(scaler=None)
    assert verdict(given, PLAN, reporting_own_loss(1.0), precision).noted == ()
    assert verdict(given, PLAN, reporting_own_loss(1 / 3), precision).noted == ("log.loss_factor",)


def test_a_model_that_the_loop_cast_is_a_fault_and_no_error() -> None:
    def cast(rank: Rank) -> None:
        rank.module.float()
        accumulate(rank)

    found = verdict(experiment(scaler=None), PLAN, cast, "fp64")
    assert found.status == "fault", found.explain()
    assert any("is float32 in update 0, and float64" in f.text for f in found.findings)


def test_a_factor_that_float32_rounded_is_said_to_be_one() -> None:
    def in_single(rank: Rank) -> None:
        for group in rank.groups:
            third = float(torch.tensor(1.0) / 3.0)  # 1/3 in float32 is off by 3e-8 of itself
            for k, batch in enumerate(group):
                last = k == len(group) - 1
                with contextlib.nullcontext() if last else rank.model.no_sync():
                    (right(rank, group, batch) * third * 3.0).backward()
            finish(rank)

    found = verdict(experiment(scaler=None), PLAN, in_single, "fp64")
    assert found.causes == ("differs.gradient",)
    assert "counts 1 + 3.0e-8 times what the plan gives it" in found.findings[0].text
    assert "float32 rounded" in found.findings[0].text


def test_an_average_beside_the_ranks_own_is_said_to_be_another() -> None:
    def kept(rank: Rank) -> None:
        own = copy.deepcopy(rank.average)
        for group in rank.groups:
            accumulated(rank, group)
            updated(rank)
            cleared(rank)
            own.update_parameters(rank.module)

    found = verdict(AVERAGED, PLAN, kept)
    assert found.causes == ("state.ema_never",)
    assert "on another object than rank.average" in found.findings[0].text
