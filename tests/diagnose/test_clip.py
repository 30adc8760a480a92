"""Clips at the wrong time are named where they changed anything, and by what they left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from diagnose.ragged import PLAN, ragged
from faults.probes import readout
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from equivtest import Plan, Rank, check
from equivtest.faults.pieces import (
    accumulated,
    accumulated_alone,
    averaged,
    backward,
    reducing_last,
    right,
)

ACTIVE, INACTIVE = 0.01, 1e3
"""Bounds: the gradient's norm is 0.24."""


def clip(rank: Rank, scale: float = 1.0) -> None:
    if rank.clip_norm is not None:
        clip_grad_norm_(rank.module.parameters(), rank.clip_norm * scale)
    if rank.clip_value is not None:
        clip_grad_value_(rank.module.parameters(), rank.clip_value * scale)


def updated(rank: Rank) -> None:
    if rank.scaler is None:
        rank.optimizer.step()
    else:
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
    rank.optimizer.zero_grad()


@dataclass(frozen=True)
class BeforeUnscale:
    """``bound`` times the experiment's; 0: times the loss scale, which is right."""

    bound: float = 1.0

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            clip(rank, self.bound or rank.scaler.get_scale())
            updated(rank)


@dataclass(frozen=True)
class BeforeSync:
    """Clipped on each rank, then averaged, or added up with ``summed``."""

    summed: bool = False

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            accumulated_alone(rank, group)
            clip(rank, rank.scaler.get_scale() if rank.scaler else 1.0)
            averaged(rank)
            if self.summed:
                for parameter in rank.module.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(rank.D)
            updated(rank)


def averaged_and_clipped(rank: Rank) -> None:
    for group in rank.groups:
        accumulated_alone(rank, group)
        averaged(rank)
        clip(rank, rank.scaler.get_scale() if rank.scaler else 1.0)
        updated(rank)


def averaged_twice(rank: Rank) -> None:
    """Clipped between two averages: the second changes nothing, and the clip came in time."""
    for group in rank.groups:
        accumulated(rank, group)
        clip(rank)
        averaged(rank)
        updated(rank)


@pytest.mark.parametrize("given", [{"clip_norm": ACTIVE}, {"clip_value": 0.001}], ids=str)
def test_a_clip_of_scaled_gradients_is_named(given: dict[str, float]) -> None:
    verdict = check(ragged(**given), PLAN, precision="fp16-mixed", loop=BeforeUnscale())
    assert (verdict.status, verdict.causes) == ("fault", ("clip.before_unscale",))
    assert "loss scale of 65536" in verdict.findings[0].text  # GradScaler's own


def test_a_bound_that_is_scaled_as_well_is_right() -> None:
    experiment = ragged(clip_norm=ACTIVE)
    verdict = check(experiment, PLAN, precision="fp16-mixed", loop=BeforeUnscale(0))
    assert verdict.status == "equivalent", verdict.explain()


def test_another_bound_on_scaled_gradients_is_no_more_than_a_clip_that_differs() -> None:
    experiment = ragged(clip_norm=ACTIVE)
    verdict = check(experiment, PLAN, precision="fp16-mixed", loop=BeforeUnscale(2.0))
    assert verdict.causes == ("differs.clip",)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("given", [{"clip_norm": ACTIVE}, {"clip_value": 0.001}], ids=str)
def test_a_clip_on_each_rank_is_named(precision: str, given: dict[str, float]) -> None:
    verdict = check(ragged(**given), PLAN, precision=precision, loop=BeforeSync())
    assert verdict.causes == ("clip.before_sync",), verdict.explain()


def test_what_the_ranks_would_have_reduced_is_judged() -> None:
    """Their sum in place of the average is another fault, and is seen beside."""
    verdict = check(ragged(clip_norm=ACTIVE), PLAN, loop=BeforeSync(summed=True))
    assert len(verdict.causes) == 2, verdict.explain()
    assert "clip.before_sync" in verdict.causes


def test_a_bound_that_no_rank_reaches_is_noted() -> None:
    verdict = check(ragged(clip_norm=INACTIVE), PLAN, loop=BeforeSync())
    assert verdict.status == "equivalent", verdict.explain()
    assert any("before the reduction" in note for note in verdict.notes)


@pytest.mark.parametrize("loop", [averaged_and_clipped, averaged_twice])
@pytest.mark.parametrize("bound", [ACTIVE, INACTIVE])
def test_a_clip_of_the_average_is_right(loop: Callable[[Rank], None], bound: float) -> None:
    verdict = check(ragged(clip_norm=bound), PLAN, loop=loop)
    assert verdict.status == "equivalent", verdict.explain()


# -- the toys of the field: exact numbers


def test_3_and_minus_1_give_0() -> None:
    """Clamped to 1 and -1, the ranks average 0 where the average of 3 and -1 is 1."""
    experiment = readout([1.0, 1.0], [3.0, -1.0], clip_value=1.0)
    verdict = check(experiment, Plan(1, 1, 2), precision="fp64", loop=BeforeSync())
    assert verdict.causes == ("clip.before_sync",), verdict.explain()
    norms = {row.tensor: row.norm for row in verdict.rows}
    assert norms["s"] == 0.0


def each_time(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            clip(rank, rank.scaler.get_scale() if rank.scaler else 1.0)
        updated(rank)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "fp16-mixed"])
@pytest.mark.parametrize("given", [{"clip_norm": ACTIVE}, {"clip_value": 0.001}], ids=str)
def test_a_clip_after_each_backward_is_named(precision: str, given: dict[str, float]) -> None:
    verdict = check(ragged(**given), PLAN, precision=precision, loop=each_time)
    assert verdict.causes == ("clip.per_microbatch",), verdict.explain()


@pytest.mark.parametrize("given", [{"clip_norm": INACTIVE}, {"clip_value": INACTIVE}], ids=str)
def test_a_bound_that_is_never_reached_is_noted(given: dict[str, float]) -> None:
    verdict = check(ragged(**given), PLAN, loop=each_time)
    assert verdict.status == "equivalent"
    assert any("between backward passes" in note for note in verdict.notes)


def test_a_third_of_the_parameters_unclipped_is_told() -> None:
    def some(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            clip_grad_norm_([rank.module.first.weight], ACTIVE)  # type: ignore[union-attr, list-item]
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    verdict = check(ragged(clip_norm=ACTIVE), PLAN, loop=some)
    assert verdict.cause == "differs.clip"
    assert "3 of 4 tensors were not touched" in verdict.findings[0].text


def test_another_bound_is_told() -> None:
    def doubled(rank: Rank) -> None:
        for group in rank.groups:
            accumulated(rank, group)
            clip(rank, 2.0)
            rank.optimizer.step()
            rank.optimizer.zero_grad()

    verdict = check(ragged(clip_norm=ACTIVE), PLAN, loop=doubled)
    assert verdict.cause == "differs.clip"
    assert "the loop's clip had the bound 0.02" in verdict.findings[0].text
