"""Clip and loss scaling: the numbers of the field's toys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from faults.probes import PROBE_C, gradients, linear, traces

from equivtest import Plan, Rank, check
from equivtest.faults import amp
from equivtest.faults import clip as c
from equivtest.faults.pieces import accumulated, finish
from equivtest.faults.registry import planted
from equivtest.loops import accumulate


@pytest.mark.parametrize(
    ("loop", "clipped"),
    [
        # the norm of (1.5, 2) is 2.5
        (accumulate, [0.6, 0.8]),
        # (1.5, 0) becomes (1, 0); (1, 2) over sqrt(5)
        (c.per_microbatch, [0.4472, 0.8944]),
        (c.missing, [1.5, 2.0]),
    ],
    ids=["right", "per microbatch", "missing"],
)
def test_probe_c_tells_where_the_clip_is(
    loop: Callable[[Rank], None], clipped: list[float]
) -> None:
    (held,) = gradients(PROBE_C, Plan(1, 2, 1), loop, clipped=True)
    assert held["v"] == pytest.approx(clipped, abs=5e-5)


@pytest.mark.parametrize("in_precision", ["fp64", "fp32", "fp16-mixed"])
def test_a_clip_of_scaled_gradients_takes_the_scale_for_the_norm(in_precision: str) -> None:
    """(0.3, 0.4) times 1024 has norm 512: clipped to (0.6, 0.8), over 1024."""
    rows = linear(
        [0.3, 0.4],
        clip_norm=1.0,
        scaler=lambda device: torch.amp.GradScaler(device, init_scale=1024.0),
    )
    plan = Plan(1, 1, 1)
    # A float16 forward rounds 0.3 and 0.4 to 11 bits.
    allowed = 2.0**-11 if in_precision == "fp16-mixed" else 1e-6
    (right,) = gradients(rows, plan, clipped=True, in_precision=in_precision)
    assert right["v"] == pytest.approx([0.3, 0.4], rel=allowed)
    (wrong,) = traces(rows, plan, c.before_unscale, in_precision=in_precision)
    moved = wrong.updates[0].before["v"] - wrong.updates[0].after["v"]  # lr 1
    assert moved.tolist() == pytest.approx([0.6 / 1024, 0.8 / 1024], rel=max(allowed, 1e-5))


def test_clipped_before_the_reduction_3_and_minus_1_cancel() -> None:
    """1 and -1 average to 0; the average of 3 and -1 is 1."""
    rows = linear([3.0], [-1.0], clip_norm=1.0)
    plan = Plan(1, 1, 2)
    for held in gradients(rows, plan, clipped=True):
        assert held["v"] == pytest.approx([1.0], abs=2e-6)  # clip_grad_norm_ adds 1e-6 to the norm
    for held in gradients(rows, plan, c.before_sync, clipped=True):
        assert held["v"] == pytest.approx([0.0], abs=2e-6)


def scaled_by(scale: float) -> Callable[[str], torch.amp.GradScaler]:
    return lambda device: torch.amp.GradScaler(device, init_scale=scale)


def test_scales_of_2_and_8_give_6_5_and_1_625() -> None:
    """(2 * 1 + 8 * 3) / 2 = 13, over 2 and over 8; right is 2."""
    rows = linear([1.0], [3.0], scaler=scaled_by(8.0))
    found = gradients(rows, Plan(1, 1, 2), amp.scale_differs, in_precision="fp16-mixed")
    assert [held["v"] for held in found] == [[6.5], [1.625]]


@pytest.mark.parametrize("in_precision", ["fp64", "fp16-mixed"])
def test_unscaled_after_each_microbatch_torchs_scaler_raises(in_precision: str) -> None:
    rows = linear(*[[1.0]] * 3)
    verdict = check(rows, Plan(1, 3, 1), precision=in_precision, loop=amp.unscale_per_micro)
    assert verdict.status == "error"
    assert verdict.failure is not None
    assert "unscale_() has already been called" in verdict.failure.text


def test_a_hand_written_unscale_divides_early_microbatches_again() -> None:
    """Weights 1/1024**2, 1/1024, 1 of the third that each has."""
    rows = linear([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])
    (held,) = gradients(rows, Plan(1, 3, 1), amp.unscale_per_micro_by_hand)
    assert held["v"] == pytest.approx([1 / 3 / 1024**2, 1 / 3 / 1024, 1 / 3], rel=1e-12)


@pytest.mark.parametrize("in_precision", ["fp64", "fp16-mixed"])
def test_unscaled_twice_is_over_the_scale(in_precision: str) -> None:
    rows = linear([1.0], [3.0], scaler=scaled_by(1024.0))
    for held in gradients(rows, Plan(1, 1, 2), amp.double_unscale, in_precision=in_precision):
        assert held["v"] == [2.0 / 1024]


def test_scales_of_one_group_are_mixed() -> None:
    """The scale halves twice: microbatches count 4, 2 and 1 times the third that each has."""
    rows = linear([1.0, 0, 0], [0, 1.0, 0], [0, 0, 1.0])
    (held,) = gradients(rows, Plan(1, 3, 1), amp.scale_changes_inside_group)
    assert held["v"] == pytest.approx([4 / 3, 2 / 3, 1 / 3], rel=1e-12)


def with_a_scaler(rank: Rank) -> None:
    """A right loop with a scaler of its own, as the planted ones have."""
    rank.scaler = amp.own_scaler(rank)
    for group in rank.groups:
        accumulated(rank, group)
        finish(rank)


@pytest.mark.parametrize("in_precision", ["fp64", "fp32", "bf16-mixed"])
def test_a_scaler_of_ones_own_is_no_fault(in_precision: str) -> None:
    # Eight: the loss of this toy is in bfloat16 under autocast, and 1/12 is none.
    rows = linear(*[[1.0, float(i)] for i in range(8)], updates=2, clip_norm=0.1)
    verdict = check(rows, Plan(1, 4, 2), precision=in_precision, loop=with_a_scaler)
    assert verdict.status == "equivalent"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("clip.missing", ""),
        ("clip.per_microbatch", ""),
        ("clip.before_sync", "D is 1: there is nothing to reduce"),
        ("amp.scale_differs", "D is 1: there is nothing to reduce"),
    ],
)
def test_where_it_cannot_show_it_says_why(name: str, reason: str) -> None:
    assert planted(name).applies(PROBE_C, Plan(1, 2, 1)) == reason


def test_what_does_not_clip_is_given_a_bound() -> None:
    rows = replace(PROBE_C, clip_norm=None)
    assert planted("clip.missing").applies(rows, Plan(1, 2, 1)) == "the experiment does not clip"
    made = planted("clip.missing").plant(rows, Plan(1, 2, 1))
    assert made is not None
    assert made.experiment.clip_norm == 0.01
