"""A module runs on microbatches inside a large batch, or its own code does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivtest.isolate.cut.axes import Layout
from equivtest.isolate.cut.modules import Anatomy, NotCuttable, between, in_chunks

ROWS, SHARED = Layout((0,)), Layout()
X = torch.arange(8.0).view(4, 2)


class Doubling(nn.Module):
    """Twice its input; it counts its calls and their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.rows = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.rows += len(x)
        return 2 * x


class Outer(nn.Module):
    """Doubles, takes the mean away and doubles; keeps that mean and lists its square."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = Doubling()
        self.mean: Any = None
        self.squares: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.twice(x)
        self.mean = x.mean(0)
        self.squares.append(self.mean.square().sum())
        return self.twice(x - self.mean), x.sum()


def refuse() -> None:
    raise AssertionError("refused")


def run(outer: Outer, weights: Sequence[float], inside: Any) -> tuple[Tensor, Tensor]:
    anatomy = Anatomy((ROWS,), (ROWS, SHARED, SHARED, SHARED))
    with in_chunks(outer, [anatomy], [1, 3], weights, refuse, inside):
        result: tuple[Tensor, Tensor] = outer(X)
    assert "forward" not in vars(outer)
    return result


INSIDE = {"twice": [Anatomy((ROWS,), (ROWS,))] * 2}


@pytest.mark.parametrize("inside", [None, INSIDE], ids=["all of it", "its own code"])
def test_rows_are_joined_and_the_rest_is_weighed(inside: Any) -> None:
    """Rows (0, 1) and (2, 3), (4, 5), (6, 7): doubled, their means are (0, 2) and (8, 10)."""
    outer = Outer()
    rows, total = run(outer, [0.25, 0.75], inside)
    assert rows.tolist() == [[0, 0], [-8, -8], [0, 0], [8, 8]]
    assert total.item() == 0.25 * 2 + 0.75 * 54
    assert outer.mean.tolist() == [0.75 * 8, 0.25 * 2 + 0.75 * 10]
    assert [s.item() for s in outer.squares] == [0.25 * 4 + 0.75 * 164]


def test_modules_in_it_run_once_on_the_large_batch() -> None:
    outer = Outer()
    run(outer, [0.25, 0.75], INSIDE)
    assert (outer.twice.calls, outer.twice.rows) == (2, 2 * 4)


def test_all_of_it_runs_in_microbatches() -> None:
    outer = Outer()
    run(outer, [0.25, 0.75], None)
    assert (outer.twice.calls, outer.twice.rows) == (4, 2 * (1 + 3))


def test_what_does_not_fit_runs_on_the_large_batch() -> None:
    refused: list[bool] = []
    module = Doubling()
    unknown = [Anatomy((Layout(known=False),), (ROWS,))]
    with in_chunks(module, unknown, [1, 3], [1, 1], lambda: refused.append(True)):
        assert torch.equal(module(X), 2 * X)
    assert refused == [True]


def test_microbatches_that_ask_for_different_modules_cannot_be_run() -> None:
    modules = {"a": Doubling(), "b": Doubling()}
    anatomy = {name: [Anatomy((ROWS,), (ROWS,))] for name in modules}
    with pytest.raises(NotCuttable):
        between(lambda k: modules["ab"[k]](X[k : k + 1]), modules, anatomy, [1, 1], [0.5, 0.5])
