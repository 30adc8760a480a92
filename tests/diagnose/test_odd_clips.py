"""Clips that a hook or a hand makes, and skips by hand: right ones are left alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    momentum,
    verdict,
)
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from equivtest import Experiment, Group, Plan, Rank
from equivtest.faults.pieces import cleared, updated
from equivtest.loops import accumulate

# -- clips that a hook or a hand makes


def own_sums(rank: Rank, group: Group) -> list[Tensor]:
    """Gradients of each microbatch's own sum, undivided, by a loss of the loop's own."""
    for k, batch in enumerate(group):
        last = k == len(group) - 1
        with contextlib.nullcontext() if last else rank.model.no_sync():
            with rank.autocast():
                off = rank.model(batch["x"].to(rank.module.first.weight.dtype)) - batch["y"]
            (off.square() * batch["counts"]).sum().backward()
    return [p.grad for p in rank.module.parameters()]


def clipped_by_a_hook(rank: Rank) -> None:
    held, bound = list(rank.module.parameters()), rank.clip_norm
    rank.optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(held, bound) and None)
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)


def divided_and_clipped_at_once(rank: Rank) -> None:
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        size = float(get_total_norm(gradients)) * share
        torch._foreach_mul_(gradients, share * min(1.0, rank.clip_norm / (size + 1e-6)))
        updated(rank)
        cleared(rank)


def clipped_to_a_scaled_bound(rank: Rank) -> None:
    """The sum is clipped to the bound of the sum, and divided then."""
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm / share)
        torch._foreach_mul_(gradients, share)
        updated(rank)
        cleared(rank)


def clipped_before_it_is_divided(rank: Rank) -> None:
    for group in rank.groups:
        gradients, share = own_sums(rank, group), rank.D / float(group.count)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        torch._foreach_mul_(gradients, share)
        updated(rank)
        cleared(rank)


def cleared_before_the_update(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
        rank.optimizer.zero_grad(set_to_none=False)
        rank.optimizer.step()


CLIPPED = experiment(scaler=None, clip_norm=0.1)
RIGHT_CLIPS = (clipped_by_a_hook, divided_and_clipped_at_once, clipped_to_a_scaled_bound)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loop", RIGHT_CLIPS)
def test_a_clip_may_be_made_in_any_way(loop: Callable[[Rank], None], precision: str) -> None:
    found = verdict(CLIPPED, PLAN, loop, precision)
    assert found.status == "equivalent", found.explain()


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        (clipped_before_it_is_divided, "times the clipped gradient: it was multiplied after"),
        (cleared_before_the_update, "nothing but zeros reached the optimizer"),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_becomes_of_a_gradient_after_its_clip_is_said(
    loop: Callable[[Rank], None], says: str, precision: str
) -> None:
    found = verdict(CLIPPED, PLAN, loop, precision)
    assert found.status == "fault"
    assert any(f.cause == "differs.clip" and says in f.text for f in found.findings)


def clamped_by_hand(times: float) -> Callable[[Rank], None]:
    """Its own sums, divided, ``times`` over, and clamped."""

    def loop(rank: Rank) -> None:
        for group in rank.groups:
            gradients = own_sums(rank, group)
            torch._foreach_mul_(gradients, times * rank.D / float(group.count))
            for gradient in gradients:
                gradient.clamp_(-rank.clip_value, rank.clip_value)
            updated(rank)
            cleared(rank)

    return loop


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_a_clamp_by_hand_hides_no_factor(plan: Plan, precision: str) -> None:
    """But where all elements are beyond the bound, and every factor gives the same update."""
    tight = experiment(scaler=None, clip_value=0.005, optimizer=momentum)
    assert verdict(tight, plan, clamped_by_hand(1.0), precision).status == "equivalent"
    given = replace(tight, clip_value=0.02)
    assert verdict(given, plan, clamped_by_hand(1.0), precision).status == "equivalent"
    for times in (0.7, 0.8, 1.1, 1.5):
        assert verdict(given, plan, clamped_by_hand(times), precision).status == "fault"


def clipped_by_hand(
    rank: Rank, divide: float = 1.0, bound: float = 1.0, clips: bool = True
) -> None:
    """Divided and clipped with a norm that no hook sees, each times a factor that may be wrong."""
    for group in rank.groups:
        gradients = own_sums(rank, group)
        torch._foreach_mul_(gradients, divide * rank.D / float(group.count))
        size = float(sum((g * g).sum() for g in gradients).sqrt())
        if clips:
            torch._foreach_mul_(gradients, min(1.0, bound * rank.clip_norm / (size + 1e-6)))
        updated(rank)
        cleared(rank)


@pytest.mark.parametrize(
    ("bound", "loop", "named"),
    [
        (0.1, partial(clipped_by_hand, bound=1.01), "differs.clip"),
        (0.1, partial(clipped_by_hand, clips=False), "clip.missing"),
        (50.0, partial(clipped_by_hand, divide=0.9), "differs.gradient"),
        (50.0, partial(clipped_by_hand, divide=0.9, clips=False), "differs.gradient"),
        (50.0, partial(clipped_by_hand, divide=0.5), "norm.missing_world_size"),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32"])
def test_what_is_divided_by_hand_is_not_called_undivided(
    bound: float, loop: Callable[[Rank], None], named: str, precision: str
) -> None:
    assert causes(replace(CLIPPED, clip_norm=bound), PLAN, loop, precision) == {named}


@pytest.mark.parametrize("bound", [0.444, 0.445, 0.446, 0.447])
def test_a_norm_at_the_bound_may_be_on_either_side_of_it(bound: float) -> None:
    """The gradient's norm is 0.4444, and under autocast rounds by as much as 0.4 %."""
    given = replace(CLIPPED, clip_norm=bound, optimizer=momentum)
    assert verdict(given, PLAN, clipped_by_hand, "bf16-mixed").status == "equivalent"


def hook_that_removes_itself(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        held: list[Any] = []

        def clip(*_: Any, held: list[Any] = held) -> None:
            clip_grad_norm_(rank.module.parameters(), rank.clip_norm)
            held[0].remove()

        held.append(rank.optimizer.register_step_pre_hook(clip))
        updated(rank)
        cleared(rank)


def clipped_twice(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        for bound in (10 * rank.clip_norm, rank.clip_norm):
            clip_grad_norm_(rank.module.parameters(), bound)
        updated(rank)
        cleared(rank)


def hook_of_each(rank: Rank) -> None:
    """Of two optimizers, each of which clips the whole model before it runs."""
    held, bound = list(rank.module.parameters()), rank.clip_norm
    for optimizer in rank.optimizer.values():
        optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(held, bound) and None)
    for group in rank.groups:
        accumulated(rank, group)
        updated(rank)
        cleared(rank)


def two_optimizers(module: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {
        "first": torch.optim.SGD(module.first.parameters(), lr=0.1),
        "last": torch.optim.SGD(module.last.parameters(), lr=0.1),
    }


@pytest.mark.parametrize("precision", PRECISIONS)
def test_clips_in_turn_are_one_clip(precision: str) -> None:
    assert verdict(CLIPPED, PLAN, hook_that_removes_itself, precision).status == "equivalent"
    assert verdict(CLIPPED, PLAN, clipped_twice, precision).status == "equivalent"
    given = replace(CLIPPED, optimizer=two_optimizers)
    assert verdict(given, PLAN, hook_of_each, precision).status == "equivalent"


# -- a skip by hand


def skipping_by_hand(rank: Rank) -> None:
    """A guard that leaves an update out whose gradient is not finite."""
    for group in rank.groups:
        accumulated(rank, group)
        norms = [p.grad.norm() for p in rank.module.parameters()]
        if torch.stack(norms).isfinite().all():
            updated(rank)
        cleared(rank)


def skipping_a_finite_one(rank: Rank) -> None:
    for group in rank.groups:
        accumulated(rank, group)
        if group.update != 1:
            updated(rank)
        cleared(rank)


def with_an_infinite_target() -> Experiment:
    """That of example 15, which is in the second update."""
    given = experiment(scaler=None)
    data = [dict(example) for _ in range(2) for example in given.data]
    data[15]["y"] = torch.full((2,), torch.inf)
    return replace(given, data=data, updates=2)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plan", [PLAN, EQUAL], ids=str)
def test_a_skip_by_hand_of_what_is_not_finite_is_right(plan: Plan, precision: str) -> None:
    found = verdict(with_an_infinite_target(), plan, skipping_by_hand, precision)
    assert found.status == "equivalent", found.explain()
    assert [row.applied for row in found.updates].count(False) == 1


def test_an_infinite_gradient_that_is_applied_is_not() -> None:
    """The large batch has it as well: it is the experiment's."""
    found = verdict(with_an_infinite_target(), PLAN, accumulate)
    assert found.status == "unexplained"
    assert "the experiment itself diverges" in found.findings[0].text


def test_a_skip_by_hand_of_what_is_finite_is_a_fault() -> None:
    assert verdict(experiment(scaler=None), PLAN, skipping_a_finite_one).status == "fault"


# -- a clip that never acts


def test_a_clip_that_never_acts_is_said_to_show_nothing() -> None:
    idle = verdict(replace(CLIPPED, clip_norm=1e3), PLAN, accumulate)
    assert any("the bound 1000: no update is clipped" in note for note in idle.notes), idle.notes
    active = verdict(CLIPPED, PLAN, accumulate)
    assert not any("no update is clipped" in note for note in active.notes)
