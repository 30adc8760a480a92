"""Schedules that are off are named by what moves them, and right ones left alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from diagnose.event_cases import (
    EQUAL,
    PLAN,
    accumulated,
    causes,
    experiment,
    finish,
    microbatches,
    verdict,
)
from torch.optim import lr_scheduler as lr

from equivtest import Plan, Rank
from equivtest.loops import accumulate, update


def linear(optimizer: Any) -> Any:
    """Probe U's: from 1 to 0 over 12 updates."""
    return lr.LambdaLR(optimizer, lambda calls: max(0.0, 1 - calls / 12))


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=1.0)


SCHEDULED = experiment(scheduler=linear)


# -- loops


def after_each_backward(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for _ in microbatches(rank, group):
            scheduler.step()
        finish(rank)


def at_each_iteration(rank: Rank) -> None:
    """One loop over microbatches, the way most trainers are written."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for k in microbatches(rank, group):
            if k == len(group) - 1:
                finish(rank)
            scheduler.step()


def per_process(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        for _ in range(rank.D):
            scheduler.step()


def per_process_and_microbatch(rank: Rank) -> None:
    """A wrapped scheduler that moves D times, called for each microbatch."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        for _ in microbatches(rank, group):
            for _ in range(rank.D):
                scheduler.step()
        finish(rank)


def before_update(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        scheduler.step()
        finish(rank)


def never(rank: Rank) -> None:
    rank.scheduler = None
    accumulate(rank)


def per_update(rank: Rank) -> None:
    """Right where the unit is an attempted update."""
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        scheduler.step()


def if_applied(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        if finish(rank):
            scheduler.step()


def by_hand(rank: Rank) -> None:
    """No scheduler object: the loop writes the rate itself, counting microbatches."""
    rank.scheduler, done = None, 0
    for group in rank.groups:
        for _ in microbatches(rank, group):
            done += 1
        for held in rank.optimizer.param_groups:
            held["lr"] = held["initial_lr"] * (1 - done / 12)
        finish(rank)


LOOPS = [
    (after_each_backward, {"sched.per_microbatch"}),
    (at_each_iteration, {"sched.per_microbatch"}),
    (per_process, {"sched.per_process"}),
    (before_update, {"sched.before_update"}),
    (never, {"sched.never"}),
    (by_hand, {"sched.per_microbatch"}),
]


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
@pytest.mark.parametrize(("loop", "cause"), LOOPS, ids=lambda one: getattr(one, "__name__", ""))
def test_what_moves_the_schedule_is_named(
    loop: Callable[[Rank], None], cause: set[str], plan: Plan, precision: str
) -> None:
    assert causes(SCHEDULED, plan, loop, precision) == cause


def test_two_that_multiply_are_both_named() -> None:
    """3 updates of 2 microbatches at D=3 are 18 calls: the decay must still move there."""
    slow = replace(SCHEDULED, scheduler=lambda o: lr.ExponentialLR(o, 0.97))
    found = causes(slow, Plan(1, 2, 3), per_process_and_microbatch)
    assert found == {"sched.per_microbatch", "sched.per_process"}


@pytest.mark.parametrize(
    ("loop", "rate", "cause"),
    [
        (accumulate, 0.75, None),
        (at_each_iteration, 0.25, "sched.per_microbatch"),
        (per_process, 0.5, "sched.per_process"),
    ],
    ids=["right", "per microbatch", "per process"],
)
def test_probe_u(loop: Callable[[Rank], None], rate: float, cause: str | None) -> None:
    """1 - 3/12, 1 - 9/12 and 1 - 6/12."""
    given = replace(SCHEDULED, optimizer=sgd)
    found = verdict(given, PLAN, loop)
    assert found.causes == (() if cause is None else (cause,))
    if cause == "sched.per_microbatch":
        # Update 0 comes after two calls of three: 1 - 2/12.
        assert "lr=0.833333 at update 0, where 1 is due" in found.findings[0].text
    if cause == "sched.per_process":
        # Update 1 comes after two calls, one is due: 1 - 1/12.
        assert "lr=0.833333 at update 1, where 0.916667 is due" in found.findings[0].text


# -- units


@pytest.mark.parametrize("precision", ["fp64", "fp32"])
@pytest.mark.parametrize("loop", [per_update, if_applied], ids=["attempted", "applied"])
def test_another_unit_than_the_announced_one(loop: Callable[[Rank], None], precision: str) -> None:
    given = replace(SCHEDULED, scheduler_unit="microbatch")
    assert causes(given, PLAN, loop, precision) == {"sched.wrong_unit"}


OVERFLOWING = replace(
    SCHEDULED,
    scaler=lambda device: torch.amp.GradScaler(device, init_scale=2.0**40, backoff_factor=2.0**-30),
)
"""Its first update is skipped, and no other."""


def on_every_attempt(rank: Rank) -> None:
    scheduler, rank.scheduler = rank.scheduler, None
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)
        scheduler.step()


@pytest.mark.parametrize(
    ("unit", "loop", "cause"),
    [
        ("applied", if_applied, None),
        ("applied", on_every_attempt, "sched.steps_on_skip"),
        ("attempted", on_every_attempt, None),
        ("attempted", if_applied, "sched.wrong_unit"),
    ],
)
def test_a_schedule_beside_a_skip(unit: Any, loop: Callable[[Rank], None], cause: str) -> None:
    given = replace(OVERFLOWING, scheduler_unit=unit)
    found = verdict(given, PLAN, loop, "fp16-mixed")
    assert not found.updates[0].applied
    named = {name for name in found.causes if not name.startswith("source.")}
    assert named == ({cause} if cause else set())


# -- horizons


HORIZONS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "lambda": (linear, lambda o: lr.LambdaLR(o, lambda calls: max(0.0, 1 - calls / 36))),
    "linear": (
        lambda o: lr.LinearLR(o, 1.0, 0.1, total_iters=4),
        lambda o: lr.LinearLR(o, 1.0, 0.1, total_iters=12),
    ),
    "cosine": (lambda o: lr.CosineAnnealingLR(o, 4), lambda o: lr.CosineAnnealingLR(o, 12)),
    "polynomial": (
        lambda o: lr.PolynomialLR(o, total_iters=4, power=2.0),
        lambda o: lr.PolynomialLR(o, total_iters=12, power=2.0),
    ),
    "one cycle": (
        lambda o: lr.OneCycleLR(o, 0.1, total_steps=4),
        lambda o: lr.OneCycleLR(o, 0.1, total_steps=12),
    ),
    "warm-up, then decay": (
        lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.5, 1.0, 1), lr.CosineAnnealingLR(o, 4)], milestones=[1]
        ),
        lambda o: lr.SequentialLR(
            o, [lr.LinearLR(o, 0.5, 1.0, 3), lr.CosineAnnealingLR(o, 12)], milestones=[3]
        ),
    ),
}


@pytest.mark.parametrize("name", HORIZONS)
def test_a_horizon_in_microbatches_is_named(name: str) -> None:
    """The loop builds its own scheduler and takes updates * A for the number of its updates."""
    right, longer = HORIZONS[name]

    def loop(rank: Rank) -> None:
        fresh = type(rank.optimizer)(rank.module.parameters(), lr=0.05, weight_decay=0.1)
        rank.optimizer, rank.scheduler = fresh, longer(fresh)
        accumulate(rank)

    given = replace(SCHEDULED, scheduler=right)
    assert causes(given, PLAN, accumulate) == set()
    assert causes(given, PLAN, loop) == {"count.micro_vs_update"}


# -- what is left alone, or keeps its general name


@pytest.mark.parametrize("unit", ["applied", "attempted", "microbatch"])
def test_a_right_schedule_is_left_alone(unit: Any) -> None:
    given = replace(SCHEDULED, scheduler_unit=unit)
    assert causes(given, PLAN, accumulate) == set()


def _with(key: str, value: float, loop: Callable[[Rank], None]) -> Callable[[Rank], None]:
    def planted(rank: Rank) -> None:
        for held in rank.optimizer.param_groups:
            held[key] = value
        loop(rank)

    return planted


def test_another_rate_keeps_its_general_name() -> None:
    def off(rank: Rank) -> None:
        rank.scheduler.base_lrs = [1.01 * rate for rate in rank.scheduler.base_lrs]
        accumulate(rank)

    assert causes(SCHEDULED, PLAN, off) == {"differs.hyperparameters"}


def test_a_decay_left_out_beside_a_schedule_that_is_off_is_told_too() -> None:
    found = causes(SCHEDULED, PLAN, _with("weight_decay", 0.0, at_each_iteration))
    assert found == {"sched.per_microbatch", "differs.hyperparameters"}


def test_a_rate_changed_while_the_update_runs_is_no_schedule() -> None:
    def inside(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            kept = rank.optimizer.param_groups[0]["lr"]
            rank.optimizer.param_groups[0]["lr"] = 2 * kept
            update(rank, [rank.optimizer])
            rank.optimizer.param_groups[0]["lr"] = kept
            rank.scheduler.step()
            rank.optimizer.zero_grad()

    assert causes(SCHEDULED, PLAN, inside) == {"differs.hyperparameters"}


def test_an_optimizer_and_a_schedule_of_the_loop_s_own_are_left_alone() -> None:
    """What the loop leaves is read from the optimizer that it moved."""

    def loop(rank: Rank) -> None:
        fresh = torch.optim.AdamW(rank.module.parameters(), lr=0.05, weight_decay=0.1)
        rank.optimizer, rank.scheduler = fresh, linear(fresh)
        accumulate(rank)

    assert causes(SCHEDULED, PLAN, loop) == set()
