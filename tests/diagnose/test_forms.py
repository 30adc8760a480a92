"""Weights that normalisations give, in the numbers of the fault catalogue's probes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from equivtest.causes import Cause
from equivtest.diagnose.forms import Reading, Setting, readings

# Probe T: D=2, A=3, N=15; ds is the sum of weight * n * g / N, and 0.8 is right.
T_COUNTS, T_GRADIENTS = ((1, 3, 2), (2, 6, 1)), ((8, 2, -1), (1, -1, 4))
ONE_EACH = ((1, 1, 1), (1, 1, 1))
T = Setting(T_COUNTS, ONE_EACH, 3, {"shifted labels": [[n + 1 for n in own] for own in T_COUNTS]})
# T0 is its replica 0 alone: N=6, and 2.0 is right.
T0 = Setting(T_COUNTS[:1], ONE_EACH[:1], 3)


def weights(reading: Reading, setting: Setting) -> list[list[float]]:
    return [
        [reading.weight(setting, r, k) for k, _ in enumerate(own)]
        for r, own in enumerate(setting.supervised)
    ]


def ds(reading: Reading, setting: Setting, gradients: Sequence[Sequence[float]]) -> float:
    """The shared scalar's gradient under these weights."""
    N = sum(map(sum, setting.supervised))
    rows = zip(weights(reading, setting), setting.supervised, gradients, strict=True)
    return sum(w * n * g / N for row in rows for w, n, g in zip(*row, strict=True))


def named(setting: Setting, *causes: Cause) -> list[Reading]:
    return [one for one in readings([setting]) if one.causes == frozenset(causes)]


@pytest.mark.parametrize(
    ("cause", "number"),
    [
        (Cause.LOCAL_DENOMINATOR_DP, 1.0),
        (Cause.MEAN_OF_MEANS_BOTH, 2.1667),
        (Cause.MISSING_WORLD_SIZE, 0.4),
        (Cause.DOUBLE_ACCUM_DIVISION, 0.2667),
        (Cause.MISCOUNTED, 0.5714),
        (Cause.MISSING_ACCUM_DIVISION, 6.5),
        (Cause.SUM_CONVENTION, 1.6),
    ],
    ids=str,
)
def test_gives_the_catalogues_number(cause: Cause, number: float) -> None:
    found = [ds(one, T, T_GRADIENTS) for one in named(T, cause)]
    assert any(value == pytest.approx(number, abs=5e-5) for value in found)


def test_times_the_examples_on_all_replicas_is_a_convention_whatever_m_is() -> None:
    """1, 2 and 3 examples on each of 2 replicas."""
    unequal = Setting(T_COUNTS, ((1, 2, 3), (1, 2, 3)), 3)
    found = [weights(one, unequal) for one in named(unequal, Cause.SUM_CONVENTION)]
    assert [[2, 4, 6], [2, 4, 6]] in found


def test_divided_by_both_sizes_is_told_by_both_names() -> None:
    """0.8 over A D = 6."""
    (one,) = named(T, Cause.MISSING_WORLD_SIZE, Cause.DOUBLE_ACCUM_DIVISION)
    assert ds(one, T, T_GRADIENTS) == pytest.approx(0.8 / 6)


def test_means_on_one_replica_give_three() -> None:
    (one,) = named(T0, Cause.MEAN_OF_MEANS_ACCUM)
    assert ds(one, T0, T_GRADIENTS[:1]) == pytest.approx(3.0)


def test_weights_by_microbatch() -> None:
    """N/(D A n) of a mean of means, and N/(D n_r) of a replica's own denominator."""
    (both,) = named(T, Cause.MEAN_OF_MEANS_BOTH)
    assert weights(both, T) == [
        pytest.approx([15 / 6, 15 / 18, 15 / 12]),
        pytest.approx([15 / 12, 15 / 36, 15 / 6]),
    ]
    (local,) = named(T, Cause.LOCAL_DENOMINATOR_DP)
    assert weights(local, T) == [pytest.approx([15 / 12] * 3), pytest.approx([15 / 18] * 3)]


def test_shares_of_examples_beside_means_over_elements() -> None:
    """An example of 1 element, g=8, beside two of 5 with a sum of 10: 4.0 where 3.0 is right."""
    setting = Setting([[1, 5]], [[1, 2]], 2)
    (one,) = named(setting, Cause.WEIGHT_DENOMINATOR_MISMATCH)
    assert ds(one, setting, [[8, 10 / 5]]) == pytest.approx(4.0)


def test_a_shorter_group_divided_by_a_full_ones_accumulations() -> None:
    """One microbatch left of A=3 counts a third, and the full group as it should."""
    full, last = Setting([[2, 2, 2]], [[1, 1, 1]], 3), Setting([[2]], [[1]], 3)
    found = [one for one in readings([full, last]) if one.causes == {Cause.PARTIAL_DIVISOR}]
    assert [(weights(one, full), weights(one, last)) for one in found] == [
        ([[1.0, 1.0, 1.0]], [[pytest.approx(1 / 3)]])
    ]


def test_on_pairwise_different_sizes_only_the_right_loop_weighs_nothing_wrongly() -> None:
    right = [
        one
        for one in readings([T])
        if all(w == pytest.approx(1.0) for own in weights(one, T) for w in own)
    ]
    assert [one.causes for one in right] == [frozenset()]


def test_of_one_microbatch_nothing_is_a_mean_of_means() -> None:
    alone = Setting([[4]], [[2]], 1)
    causes = {cause for one in readings([alone]) for cause in one.causes}
    assert not causes & {Cause.MEAN_OF_MEANS_ACCUM, Cause.MEAN_OF_MEANS_BOTH}
    assert Cause.LOCAL_DENOMINATOR_DP not in causes


def test_a_count_of_zero_gives_no_number() -> None:
    setting = Setting([[0, 3], [2, 1]], [[1, 1], [1, 1]], 2)
    (one,) = named(setting, Cause.MEAN_OF_MEANS_BOTH)
    assert one.weight(setting, 0, 0) != one.weight(setting, 0, 0)
