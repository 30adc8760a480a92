"""Whether a number was drawn, and the same numbers again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from equivtest.observe.rng import RandomState

DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "torch, in place": lambda: float(torch.empty(1).bernoulli_(0.5)),
    "numpy": lambda: float(np.random.rand()),
    "numpy, normal": lambda: float(np.random.randn()),
    "python": random.random,
    "python, normal": lambda: random.gauss(0.0, 1.0),
}


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = RandomState.now()
    yield
    before.restore()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_seen_and_repeated(draw: Callable[[], float]) -> None:
    for _ in range(3):  # normal numbers come in pairs, the second of which is held in store
        before = RandomState.now()
        assert not before.moved()
        first = draw()
        assert before.moved()
        after = RandomState.now()
        second = draw()
        before.restore()
        assert draw() == first
        assert not after.moved()
        assert draw() == second


def test_the_half_of_a_pair_that_was_in_store_is_seen() -> None:
    np.random.seed(5)
    np.random.randn()
    before = RandomState.now()
    second = np.random.randn()  # leaves numpy's generator where it is
    assert before.moved()
    third = RandomState.now()
    np.random.randn()
    assert third.moved()
    before.restore()
    assert np.random.randn() == second


def test_a_seed_is_a_move_unless_it_was_the_last_one() -> None:
    np.random.seed(5)
    before = RandomState.now()
    np.random.seed(6)
    assert before.moved()
    np.random.seed(5)
    assert not before.moved()


def test_another_generator_of_numpy_is_read_as_well() -> None:
    old = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.MT19937(3))
        before = RandomState.now()
        np.random.rand()
        assert before.moved()
    finally:
        np.random.mtrand.set_bit_generator(old)


def test_the_half_of_a_pair_of_pythons_is_seen() -> None:
    random.seed(5)
    random.gauss(0.0, 1.0)
    before = RandomState.now()
    second = random.gauss(0.0, 1.0)
    assert before.moved()
    before.restore()
    assert random.gauss(0.0, 1.0) == second


def test_a_state_that_is_not_moved_is_read_once() -> None:
    before = RandomState.now()
    again = RandomState.now()
    assert again.python is before.python
    assert again.numpy is before.numpy


def a_pair_of_numpys() -> float:
    return float(np.random.randn())


def a_pair_of_pythons() -> float:
    return random.gauss(0.0, 1.0)


@pytest.mark.parametrize("draw", [a_pair_of_numpys, a_pair_of_pythons])
def test_a_half_that_restoring_put_in_store_is_seen(draw: Callable[[], float]) -> None:
    np.random.seed(5)
    random.seed(5)
    draw()
    with_half = RandomState.now()
    second = draw()
    RandomState.now()  # the same memory, and nothing in store
    with_half.restore()
    before = RandomState.now()
    assert draw() == second
    assert before.moved()
    before.restore()
    assert draw() == second


def test_a_generator_of_another_kind_is_seen_and_repeated() -> None:
    old = np.random.mtrand.get_bit_generator()
    try:
        np.random.mtrand.set_bit_generator(np.random.PCG64(3))
        before = RandomState.now()
        assert not before.moved()
        first = np.random.rand()
        assert before.moved()
        before.restore()
        assert np.random.rand() == first
    finally:
        np.random.mtrand.set_bit_generator(old)
