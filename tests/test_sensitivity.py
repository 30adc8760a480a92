"""Sensitivity: what would be caught, what cannot show and why, how small an error is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from faults.probes import linear, readout

from equivtest import Plan, Verdict, check
from equivtest.causes import Cause
from equivtest.compare.sensitivity import Outcome
from equivtest.faults.setting import Setting
from equivtest.sensitivity import LEAST_ERROR, bisected, lightest

EQUAL = linear(*([[1.0]] * 8), updates=2)
PLAN = Plan(1, 2, 2)
ROUNDOFF = {"fp64": 2.0**-53, "fp32": 2.0**-24}


@pytest.fixture(scope="module")
def asked() -> Verdict:
    """Four microbatches whose gradients are all of one norm."""
    return check(EQUAL, PLAN, precision="fp32", sensitivity=True)


def test_it_is_not_measured_unless_asked_for(asked: Verdict) -> None:
    plain = check(EQUAL, PLAN, precision="fp32")
    assert plain.sensitivity is None
    alone = replace(asked, sensitivity=None, duration_s=plain.duration_s)
    assert alone == plain


def test_known_kinds_are_caught(asked: Verdict) -> None:
    assert asked.passed
    assert asked.sensitivity is not None
    caught = {
        Cause.MISSING_WORLD_SIZE,
        Cause.DOUBLE_ACCUM_DIVISION,
        Cause.ONLY_LAST,
        Cause.STALE_CARRYOVER,
        Cause.UPDATE_PER_MICROBATCH,
    }
    assert caught <= set(asked.sensitivity.caught)
    assert set(asked.sensitivity.named) <= set(asked.sensitivity.caught)


def test_what_runs_and_is_not_seen_is_said(asked: Verdict) -> None:
    """Where all examples are alike, a loop that never reduces is right."""
    assert asked.sensitivity is not None
    unseen = [run.name for run in asked.sensitivity.of(Outcome.NOT_SEEN)]
    assert "sync.never" in unseen


def test_a_kind_that_cannot_show_says_why(asked: Verdict) -> None:
    assert asked.sensitivity is not None
    why = {run.name: run.text for run in asked.sensitivity.of(Outcome.CANNOT_SHOW)}
    assert why["clip.missing"] == "the experiment does not clip"
    assert why["norm.mean_of_means_both"].startswith("it changes no weight here")
    assert why["count.wrong_dp_size"] == "needs tp > 1, which this version does not run"


def boundary(precision: str) -> float:
    """An error e of one of four equal parts is e / 4 of their sum; 4 sqrt(A D) u is allowed."""
    return 4 * 4 * math.sqrt(4) * ROUNDOFF[precision]


def test_the_smallest_weight_error_seen_is_the_boundary_worked_out_by_hand(asked: Verdict) -> None:
    found = asked.sensitivity
    assert found is not None
    assert found.smallest_weight_seen is not None
    assert found.largest_weight_unseen is not None
    assert boundary("fp32") / 2 <= found.smallest_weight_seen <= 2 * boundary("fp32")
    assert 1 < found.smallest_weight_seen / found.largest_weight_unseen < 1.5


def test_the_microbatch_that_counts_least_is_weighed(asked: Verdict) -> None:
    """Counts 4, 1 | 2, 3: the second of the first replica; where all count alike, the first."""
    rows = readout([4.0, 1.0, 2.0, 3.0], [1.0] * 4)
    assert lightest(Setting(rows, PLAN)) == (0, 1)
    assert asked.sensitivity is not None
    assert asked.sensitivity.weighed == "update 0, replica 0, microbatch 0"


def test_a_microbatch_that_counts_nothing_is_not_weighed() -> None:
    assert lightest(Setting(readout([4.0, 0.0, 2.0, 3.0], [1.0] * 4), PLAN)) == (1, 0)


def test_an_experiment_that_the_recipe_fails_on_says_so() -> None:
    nothing = linear(*([[float("nan")]] * 4))
    verdict = check(nothing, PLAN, precision="fp64", sensitivity=True)
    assert verdict.sensitivity is not None
    assert verdict.sensitivity.reason.startswith("equivtest's own recipe is error here: ")


@pytest.mark.parametrize("guess", [1e-3, 1e-15, 0.9, 3e-7])
@pytest.mark.parametrize("least", [1e-13, 2.5e-7, 1e-3, 0.5])
def test_the_bisection_comes_within_1_5_of_the_boundary_in_12_runs(
    guess: float, least: float
) -> None:
    calls: list[float] = []

    def seen(error: float) -> bool:
        calls.append(error)
        return error >= least

    smallest, largest = bisected(seen, guess)
    assert smallest is not None
    assert largest is not None
    assert largest < least <= smallest < 1.5 * largest
    assert len(calls) <= 12


def test_the_bisection_ends_where_nothing_or_everything_is_seen() -> None:
    assert bisected(lambda error: False, 1e-3) == (None, 1.0)
    assert bisected(lambda error: True, 1e-3) == (LEAST_ERROR, None)


def test_the_bisection_keeps_to_its_runs() -> None:
    calls: list[float] = []
    bisected(lambda error: bool(calls.append(error)), 1e-14, most_runs=3)
    assert len(calls) == 3
