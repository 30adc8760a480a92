"""Root factors read from what was observed, on one group of probe T's replica 0 (N=6, A=3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from diagnose.operations import an_update

from equivtest.arms.replay import Replay
from equivtest.diagnose.roots import Roots, common_values, roots
from equivtest.observe.trace import MicrobatchTrace, UpdateTrace
from equivtest.precision import PRECISIONS

COUNTS = (1.0, 3.0, 2.0)
TOTALS = (8.0, 6.0, -2.0)
FP64 = PRECISIONS["fp64"]


def a_replay(D: int = 1, counts: Sequence[float] = COUNTS, **changes: Any) -> Replay:
    """The replay's losses; replica r has r + 1 times the totals."""
    at = [(r, k) for r in range(D) for k in range(3)]
    return Replay(
        expected=[],
        reduced=[],
        scale=[],
        totals={(r, k): ((r + 1) * TOTALS[k],) for r, k in at},
        counts={(r, k): (counts[k],) for r, k in at},
        terms=dict.fromkeys(at, ("",)),
        **changes,
    )


def made(**fields: Sequence[Any]) -> UpdateTrace:
    """An update with one microbatch for each value of the given fields."""
    rows = zip(*fields.values(), strict=True)
    microbatches = [MicrobatchTrace(None, **dict(zip(fields, row, strict=True))) for row in rows]
    return an_update((), microbatches)


def read(update: UpdateTrace, **changes: Any) -> Roots | None:
    return roots([update], a_replay(**changes), {"": 6.0}, FP64)


def test_the_right_factor_is_one_over_the_groups_count() -> None:
    found = read(made(factors=[(1 / 6,)] * 3))
    assert found is not None
    assert (found.read, found.right) == ("factors", True)
    assert found.found == {(0, k, ""): pytest.approx(1.0) for k in range(3)}


def test_means_of_means_weigh_by_the_own_count() -> None:
    """Means over A: N/(A n) = 2, 2/3 and 1."""
    found = read(made(factors=[(1 / (3 * n),) for n in COUNTS]))
    assert found is not None
    assert not found.right
    assert list(found.found.values()) == pytest.approx([2.0, 2 / 3, 1.0])


def test_a_loss_scale_is_no_weight() -> None:
    found = read(made(factors=[(1024 / 6,)] * 3, scale=[1024.0] * 3))
    assert found is not None
    assert found.right


def test_a_factor_is_told_to_the_rounding_of_its_loss() -> None:
    """1/6 in float32 is off by 1e-8 or so, and right to a float32 loss only."""
    off = made(factors=[(1 / 6 * (1 + 2.0**-25),)] * 3)
    coarse, fine = read(off, factor_u=2.0**-24), read(off)
    assert coarse is not None
    assert fine is not None
    assert (coarse.right, fine.right) == (True, False)


def test_without_factors_a_value_over_the_replays_tells() -> None:
    """The loss went into backward as the mean over its own count, never divided by A."""
    values = [total / n for total, n in zip(TOTALS, COUNTS, strict=True)]
    found = read(made(root=values, backward=[0, 1, 2]))
    assert found is not None
    assert found.read == "values"
    assert list(found.found.values()) == pytest.approx([6 / n for n in COUNTS])


@pytest.mark.parametrize(
    ("root", "backwards"),
    [
        ((1.0, 1.0, None), (0, 1, 2)),
        ((1.0, 1.0, 1.0), (0, 0, 1)),
        ((1.0, math.nan, 1.0), (0, 1, 2)),
    ],
    ids=["not seen", "one backward for two", "not a number"],
)
def test_a_value_that_is_not_the_microbatchs_own_tells_nothing(
    root: Sequence[float | None], backwards: Sequence[int]
) -> None:
    assert read(made(root=root, backward=backwards)) is None


def test_a_microbatch_that_counts_nothing_is_left_out() -> None:
    found = read(made(factors=[(1 / 6,), (None,), (1 / 6,)]), counts=(1.0, 0.0, 5.0))
    assert found is not None
    assert set(found.found) == {(0, 0, ""), (0, 2, "")}


def shares(*of: Sequence[float]) -> list[UpdateTrace]:
    return [made(root=own, backward=[0, 1, 2]) for own in of]


def test_values_of_all_replicas_together_are_told_from_their_own() -> None:
    """Two replicas, the second's losses twice the first's, over N=6: their sum is three times."""
    own = [total / 6 for total in TOTALS]
    twice, thrice = [2 * v for v in own], [3 * v for v in own]
    replay, counts = a_replay(D=2), {"": 6.0}
    values = Roots({}, 0.0, "values")
    assert common_values(shares(thrice, thrice), replay, counts, FP64, values)
    assert not common_values(shares(own, twice), replay, counts, FP64, values)


def test_values_that_the_observed_factors_give_are_the_losses_own() -> None:
    """Weights 3/2 and 3/4 times D = 2 make the values of both 3 times the first's."""
    thrice = [3 * total / 6 for total in TOTALS]
    replay, counts = a_replay(D=2), {"": 6.0}
    weights = {(r, k, ""): (1.5, 0.75)[r] for r, k in replay.totals}
    giving, right = Roots(weights, 1e-15, "factors"), Roots({}, 1e-15, "factors")
    assert not common_values(shares(thrice, thrice), replay, counts, FP64, giving)
    assert common_values(shares(thrice, thrice), replay, counts, FP64, right)


def test_equal_replicas_do_not_tell_whose_the_value_is() -> None:
    replay = a_replay(D=2)
    same = replace(replay, totals={(r, k): (TOTALS[k],) for r, k in replay.totals})
    doubled = [2 * total / 6 for total in TOTALS]
    assert not common_values(
        shares(doubled, doubled), same, {"": 6.0}, FP64, Roots({}, 0.0, "values")
    )
