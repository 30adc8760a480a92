"""Shares of games whose Shapley values are known, and the fewest sources that explain."""

from __future__ import annotations

import math
import random
from itertools import permutations

import pytest

from equivtest.isolate.attribution import MOST, Attribution, attribute

NAMES = ("source.batchnorm", "source.dropout", "source.coupling")


def attributed(sources: tuple[str, ...], left: dict[frozenset[str], float]) -> Attribution:
    return attribute(sources, left.__getitem__, lambda s: left[s] <= 1e-20)


def subsets(names: tuple[str, ...]) -> list[frozenset[str]]:
    return [
        frozenset(n for k, n in enumerate(names) if mask >> k & 1)
        for mask in range(2 ** len(names))
    ]


def test_sources_that_do_not_interact_have_their_own_parts() -> None:
    own = dict(zip(NAMES, (5.0, 3.0, 2.0), strict=True))
    left = {s: sum(v for n, v in own.items() if n not in s) for s in subsets(NAMES)}
    found = attributed(NAMES, left)
    assert found.shares == pytest.approx({NAMES[0]: 0.5, NAMES[1]: 0.3, NAMES[2]: 0.2}, abs=1e-15)
    assert (found.remainder, found.claimed, found.within) == (0.0, NAMES, True)


def test_two_that_only_act_together_share_alike() -> None:
    # The glove game: either isolated takes everything away.
    a, b = NAMES[:2]
    left = {frozenset(): 4.0, frozenset({a}): 0.0, frozenset({b}): 0.0, frozenset({a, b}): 0.0}
    found = attributed((a, b), left)
    assert found.shares == {a: 0.5, b: 0.5}
    assert found.claimed == (a,)  # one is enough, and the first is as good as the other


def test_vectors_that_overlap_share_their_inner_product() -> None:
    # d = x + y: |x + y|^2 = 1 + 1 + 2 x.y with x.y = 0.6; each has 1 + 0.6 of the 3.2.
    a, b = NAMES[:2]
    left = {frozenset(): 3.2, frozenset({a}): 1.0, frozenset({b}): 1.0, frozenset({a, b}): 0.0}
    assert attributed((a, b), left).shares == pytest.approx({a: 0.5, b: 0.5})
    # The same with |y| = 2, x.y = 1: of 7, x takes (7 - 4 + 1) / 2 = 2 and y (7 - 1 + 4) / 2 = 5.
    left = {frozenset(): 7.0, frozenset({a}): 4.0, frozenset({b}): 1.0, frozenset({a, b}): 0.0}
    assert attributed((a, b), left).shares == pytest.approx({a: 2 / 7, b: 5 / 7})


@pytest.mark.parametrize("k", range(1, MOST + 1))
def test_shares_are_those_of_all_orders_and_add_up_to_one(k: int) -> None:
    names = tuple(f"source.{n}" for n in range(k))
    draw = random.Random(k)
    left = {s: draw.uniform(0.1, 1.0) for s in subsets(names)}
    found = attributed(names, left)
    orders = list(permutations(names))
    for name in names:
        taken = 0.0
        for order in orders:
            before = frozenset(order[: order.index(name)])
            taken += left[before] - left[before | {name}]
        wanted = taken / len(orders) / left[frozenset()]
        assert found.shares[name] == pytest.approx(wanted, abs=1e-12)
    assert sum(found.shares.values()) + found.remainder == pytest.approx(1.0, abs=1e-12)
    assert (found.claimed, found.within) == ((), False)


def test_a_source_whose_isolation_is_not_needed_is_not_claimed() -> None:
    a, b = NAMES[:2]
    left = {frozenset(): 2.0, frozenset({a}): 0.0, frozenset({b}): 2.0, frozenset({a, b}): 0.0}
    found = attributed((a, b), left)
    assert (found.claimed, found.shares[b]) == ((a,), 0.0)


def test_nothing_apart_has_no_shares() -> None:
    a = NAMES[0]
    found = attributed((a,), {frozenset(): 0.0, frozenset({a}): 0.0})
    assert (found.shares, found.remainder, found.claimed) == ({a: 0.0}, 0.0, ())
    assert not math.isnan(found.shares[a])
