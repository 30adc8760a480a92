"""Rounding that flips a branch is told from what couples, and imposing the branch explains it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from couplings import Centred, Lines
from scenes import WIDTH, a_scene, around, explained, on_lines, on_vectors
from torch import Tensor, nn
from torch.nn import functional as F

from equivtest import Plan
from equivtest.isolate import branch
from equivtest.isolate.deciding import Decision, flipped
from equivtest.isolate.places import IN_THE_LOSS

Decide = Callable[[Tensor, Tensor, Tensor], Tensor]


class Tied(nn.Module):
    """An operator at a tie that is one but for rounding, and that by the number of examples.

    ``(y + n) - n - y`` is zero in exact arithmetic and some 1e-16 in float64; the model's gradient
    goes through beside it, so that no parameter has a part in the rounding.
    """

    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.tie = Tie(decide)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, y = 3.0 * len(x), x.sin()  # all bits of float64 are in use
        return self.leave(self.tie(y, (y + n) - n - y, self.enter(x)))


class Tie(nn.Module):
    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self.decide = decide

    def forward(self, x: Tensor, zero: Tensor, slope: Tensor) -> Tensor:
        return self.decide(x, zero, slope)


def signs(x: Tensor, zero: Tensor, slope: Tensor) -> Tensor:
    """Half of each row at zero, with the gradient of ``slope``."""
    half = torch.arange(WIDTH) < WIDTH // 2
    return torch.where(half, zero, x) + (slope - slope.detach())


def equals(x: Tensor, zero: Tensor, slope: Tensor) -> Tensor:
    """Each element beside one that equals it, with gradients of another size."""
    more = slope - slope.detach()
    return torch.stack([x + more, x + zero + 2 * more], -1)


DECIDE: dict[str, Decide] = {
    "relu": lambda *tie: signs(*tie).relu(),
    "abs": lambda *tie: signs(*tie).abs(),
    "gt": lambda x, zero, slope: (x + zero > x) * slope,
    "max": lambda *tie: equals(*tie).max(-1)[0],
    "argmax": lambda x, zero, slope: torch.stack([x, x + zero], -1).argmax(-1) * slope,
    "topk": lambda *tie: equals(*tie).topk(1)[0].squeeze(-1),
    "max_pool1d": lambda *tie: F.max_pool1d(equals(*tie), 2).squeeze(-1),
}


@pytest.mark.parametrize("name", DECIDE)
def test_imposed_branches_explain_the_distance(name: str) -> None:
    found = explained(on_vectors(lambda: Tied(DECIDE[name])), Plan(2, 4, 1))
    (row,) = found.rows
    assert found.within
    assert (row.source, row.where) == ("source.branch", f"first at `tie` (Tie): {name}")
    assert row.share == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh, nn.Hardtanh, nn.ELU])
def test_no_branch_is_found_where_none_flips(act: Any) -> None:
    assert branch.detect(a_scene(on_vectors(lambda: around(act()))), ()) == []


def test_what_differs_by_more_than_rounding_is_no_tie() -> None:
    found = explained(on_vectors(lambda: around(Centred(), nn.ReLU())))
    assert [row.source for row in found.rows if row.claimed] == ["source.coupling"]


def test_a_shorter_microbatch_is_put_where_its_own_positions_are() -> None:
    whole = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    own = torch.tensor([[-1.0, -2.0], [-4.0, -5.0]])
    assert branch._over(whole, own).tolist() == [[-1, -2, 3], [-4, -5, 6]]


def test_lines_padded_to_other_lengths_are_compared() -> None:
    assert branch.detect(a_scene(on_lines(lambda: Lines(middle=nn.ReLU))), ()) == []


def test_imposing_is_limited_to_rounding() -> None:
    """Planted: a sign that differs by 1e-3 of the largest input is left as it is."""
    x, to = torch.tensor([1.0, -1e-3, -1e-17]), torch.tensor([1.0, 1e-3, 1e-17])
    assert branch._snap(x, to).tolist() == pytest.approx([1.0, -1e-3, 1e-17], rel=1e-6)


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "relu": torch.relu,
    "clamp": lambda x: x.clamp(min=0),
    "abs": torch.abs,
    "gt": lambda x: x > 0,
    "sort": lambda x: x.sort(),
    "argmax": torch.argmax,
    "max_pool": lambda x: F.max_pool1d(x[None], 2),
    "leaky_relu": F.leaky_relu,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_a_flip_is_seen_and_rounding_elsewhere_is_not(name: str) -> None:
    operator = OPERATORS[name]
    x = torch.tensor([-1e-17, 0.0, 1.0, 1.0], dtype=torch.float64)
    decision = Decision(name, IN_THE_LOSS, (x,), lambda inputs: operator(inputs[0]))
    other = torch.tensor([1e-17, 0.0, 1.0, 1.0 + 3e-16], dtype=torch.float64)
    assert flipped(decision, (other,))
    near = torch.tensor([-1.1e-17, 0.0, 1.0, 1.0], dtype=torch.float64)
    assert not flipped(decision, (near,))
