"""Right loops that are written in an odd way are left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
    momentum,
    verdict,
)
from diagnose.test_schedule import SCHEDULED, at_each_iteration
from torch import Tensor, nn

from equivtest import Plan, Rank
from equivtest.faults.pieces import averaged, bare, cleared, right, updated
from equivtest.loops import accumulate
from equivtest.observe.handed import HandedOut
from equivtest.observe.memory import GraphMemory, LivingGraphs

# -- the schedule at the top of an update


def scheduled_at_the_top(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        if group.update:
            scheduler.step()
        accumulated(rank, group)
        finish(rank)


def rate_set_at_the_top(rank: Rank) -> None:
    """No scheduler moves: the loop sets what it works out itself."""
    rank.scheduler = None
    for group in rank.groups:
        for held in rank.optimizer.param_groups:
            held["lr"] = held["initial_lr"] * max(0.0, 1 - group.update / 12)
        accumulated(rank, group)
        finish(rank)


def never_scheduled(rank: Rank) -> None:
    rank.scheduler = None
    accumulate(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loop", [scheduled_at_the_top, rate_set_at_the_top])
def test_a_schedule_at_the_top_of_an_update_is_right(
    loop: Callable[[Rank], None], precision: str
) -> None:
    assert verdict(SCHEDULED, PLAN, loop, precision).status == "equivalent"


def test_one_that_never_moves_is_not() -> None:
    assert causes(SCHEDULED, PLAN, never_scheduled) == {"sched.never"}
    # Of a single update nothing but what it leaves tells.
    alone = experiment(scheduler=SCHEDULED.scheduler, updates=1)
    assert verdict(alone, PLAN, never_scheduled).status == "fault"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, Plan(6, 1, 2)], ids=str)
def test_a_schedule_of_microbatches_moves_before_the_update_or_behind_it(
    plan: Plan, precision: str
) -> None:
    given = replace(SCHEDULED, scheduler_unit="microbatch")
    assert verdict(given, plan, accumulate, precision).status == "equivalent"
    assert verdict(given, plan, at_each_iteration, precision).status == "equivalent"


def test_one_of_microbatches_that_moves_with_updates_is_a_fault() -> None:
    given = replace(SCHEDULED, scheduler_unit="microbatch")

    def per_update(rank: Rank) -> None:
        scheduler, rank.scheduler = rank.scheduler, None
        for group in rank.groups:
            accumulated(rank, group)
            finish(rank)
            scheduler.step()

    assert verdict(given, PLAN, per_update).status == "fault"


def halving(every: int) -> Callable[[torch.optim.Optimizer], Any]:
    return lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, every, gamma=0.5)


def second_updates_alone(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        if group.update % 2:
            scheduler.step()


@pytest.mark.parametrize("updates", [2, 3])
def test_a_schedule_at_the_top_may_be_flat_until_the_end(updates: int) -> None:
    given = experiment(scheduler=halving(updates), updates=updates, optimizer=momentum)
    assert verdict(given, PLAN, scheduled_at_the_top).status == "equivalent"
    assert causes(given, PLAN, never_scheduled) == {"sched.never"}


@pytest.mark.parametrize(("plan", "updates"), [(PLAN, 3), (EQUAL, 4)], ids=str)
def test_calls_that_were_seen_refuse_a_reading(plan: Plan, updates: int) -> None:
    given = experiment(scheduler=halving(2), updates=updates, optimizer=momentum)
    assert causes(given, plan, second_updates_alone) == {"differs.hyperparameters"}


# -- gradients without backward()


def by_autograd_grad(rank: Rank) -> None:
    """Two calls a microbatch, each for half of the loss."""
    parameters = list(rank.module.parameters())
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                objective = right(rank, group, batch)
            for half in (objective * 0.25, objective * 0.75):
                gradients = torch.autograd.grad(half, parameters, retain_graph=True)
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    held = parameter.grad
                    parameter.grad = gradient if held is None else held + gradient
        averaged(rank)
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_gradients_by_autograd_grad_are_right(plan: Plan, precision: str) -> None:
    found = verdict(experiment(scaler=None), plan, by_autograd_grad, precision, wrap=bare)
    assert found.status == "equivalent", found.explain()


# -- forwards without a backward, and parts of a batch


def with_a_probe(rank: Rank) -> None:
    """Reads the loss of each microbatch once more with gradients on, and keeps its number."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            if not k:
                float(rank.module(batch["x"].to(rank.module.first.weight.dtype)).sum())
        accumulated(rank, group)
        finish(rank)


class Remembering(nn.Module):
    """A layer that autograd gives its own output to save."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x))


def test_a_forward_without_backward_leaves_no_graph() -> None:
    """Watched or not: what a tanh saves is what it gave."""
    module = Remembering()
    memory, graphs = GraphMemory(), LivingGraphs()
    for _ in range(3):
        assert graphs.begin() == 0
        assert memory.held == (0, 0)
        with memory.watching():
            output = module(torch.ones(4, 3))
        graphs.mark(output)
        assert memory.held[1] > 0
        del output


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_forward_for_its_number_alone_costs_nothing(precision: str) -> None:
    found = verdict(experiment(), PLAN, with_a_probe, precision)
    assert "mem.kept_graph" not in found.causes
    assert "mem.kept_graph" not in {f.cause for f in found.findings}


def test_rows_of_a_batch_are_not_the_batch() -> None:
    handed, x = HandedOut(), torch.arange(12.0).reshape(4, 3)
    handed.remember({"x": x}, (7, 3, 5, 1))
    assert handed.examples([x]) == (7, 3, 5, 1)
    assert handed.examples([x[:, :2]]) == (7, 3, 5, 1)  # every row, but its last column
    assert handed.examples([x[:, 1:]]) == (7, 3, 5, 1)
    assert handed.examples([x[:2]]) is None
    assert handed.examples([x[2:]]) is None
    assert handed.examples([x, x[:1]]) is None
    one = torch.ones(1, 3)
    handed.remember(one, (9,))
    assert handed.examples([one[:, 1:]]) == (9,)


def row_by_row(rank: Rank) -> None:
    """Each microbatch cut finer by the loop: right in value, and the plan's examples."""
    for group in rank.groups:
        for batch in group:
            for i in range(len(batch["x"])):
                row = {name: held[i : i + 1] for name, held in batch.items()}
                with rank.autocast():
                    right(rank, group, row).backward()
        averaged(rank)
        updated(rank)
        cleared(rank)


def test_a_microbatch_cut_finer_holds_no_example_twice() -> None:
    found = causes(experiment(scaler=None), PLAN, row_by_row, wrap=bare)
    assert "differs.examples" not in found
    assert found <= {"differs.counters"}


def by_hand(rank: Rank) -> None:
    """No optimizer runs."""
    for group in rank.groups:
        accumulated(rank, group)
        with torch.no_grad():
            for parameter in rank.module.parameters():
                parameter -= 0.1 * parameter.grad
        cleared(rank)


def test_an_update_by_hand_is_said_not_to_be_seen() -> None:
    given = experiment(
        scaler=None, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), updates=1
    )
    (finding, *_) = verdict(given, PLAN, by_hand).findings
    assert "attempted 0 updates" in finding.text
    assert "seen when a torch.optim.Optimizer runs" in finding.text


# -- the plan's own epochs


@pytest.mark.parametrize("seed", range(12))
def test_epochs_that_drop_their_tail_in_another_order_do_not_leak(seed: int) -> None:
    """The examples that one epoch drops may begin the next, as the plan deals them."""
    given = experiment(scaler=None, last_group="drop", shuffle=True, updates=4, seed=seed)
    given = replace(given, data=[*given.data, given.data[0]])
    assert verdict(given, PLAN, accumulate).status == "equivalent"
    assert verdict(replace(given, data=given.data[:10]), Plan(2, 2, 2), None).status == "equivalent"
