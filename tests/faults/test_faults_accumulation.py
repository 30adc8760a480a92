"""Accumulation, hooks and windows: the numbers of the field's toys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from faults.probes import PLAN_T, PROBE_T, gradients, linear, traces
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.faults import accumulation as a
from equivtest.faults import hooks as h
from equivtest.faults import windows as w
from equivtest.faults.pieces import backward, finish
from equivtest.faults.planting import Planted
from equivtest.faults.registry import planted
from equivtest.loops import normalised


def test_cleared_within_the_group_leaves_the_last_microbatch() -> None:
    """2/15 = 0.1333; w = (0, 0, 2 | 0, 0, 1)/15."""
    for held in gradients(PROBE_T, PLAN_T, a.only_last):
        assert held["s"] == pytest.approx([2 / 15], abs=1e-12)
        assert held["w"] == pytest.approx([x / 15 for x in (0, 0, 2, 0, 0, 1)], abs=1e-12)


def test_not_cleared_update_u_uses_u_gradients() -> None:
    """A linear loss has one gradient, 2: then 4, then 6."""
    rows = linear([1.0], [3.0], updates=3)
    for trace in traces(rows, Plan(1, 1, 2), a.stale_carryover):
        used = [update.clipped["v"] for update in trace.updates]
        assert [held.tolist() for held in used if held is not None] == [[2.0], [4.0], [6.0]]


class Players(nn.Module):
    """A generator's and a critic's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Parameter(torch.zeros(()))
        self.critic = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, frozen: bool = False) -> tuple[Tensor, Tensor]:
        """The critic's own loss, gradient x; the generator's, 3 x in both weights."""
        critic = self.critic.detach() if frozen else self.critic
        return (self.critic * x).sum(), (3 * (self.generator + critic) * x).sum()


def two_players(frozen: bool) -> Any:
    def loss(model: Any, batch: Any) -> dict[str, Loss]:
        critic, generator = model(batch, frozen)
        return {"critic": Loss(critic, len(batch)), "generator": Loss(generator, len(batch))}

    return loss


GAN = Experiment(
    model=Players,
    data=[torch.tensor(1.0)] * 4,
    loss=two_players(frozen=True),
    count=lambda batch: {"critic": len(batch), "generator": len(batch)},
    optimizer=lambda model: {
        "critic": torch.optim.SGD([model.critic], lr=1.0),
        "generator": torch.optim.SGD([model.generator], lr=1.0),
    },
    updates=1,
)


def leaking(rank: Rank) -> None:
    """The generator's backward goes through the critic, and nobody froze it."""
    leaky = two_players(frozen=False)
    for group in rank.groups:
        for batch in group:
            backward(rank, normalised(leaky(rank.model, batch), group) * rank.D)
        finish(rank)


def test_the_generators_backward_leaves_3_beside_the_critics_1() -> None:
    (right,) = gradients(GAN, Plan(2, 2, 1))
    (wrong,) = gradients(GAN, Plan(2, 2, 1), leaking)
    assert (right["critic"], right["generator"]) == ([1.0], [3.0])
    assert (wrong["critic"], wrong["generator"]) == ([4.0], [3.0])


def test_clearing_the_last_optimizer_leaves_the_others_gradients() -> None:
    """The critic, first of the mapping, uses u gradients of 1 in update u."""
    four = Experiment(**{**vars(GAN), "updates": 4})
    (trace,) = traces(four, Plan(2, 2, 1), a.leak_between_optimizers)
    used = [(u.clipped["critic"], u.clipped["generator"]) for u in trace.updates]
    assert [(float(c), float(g)) for c, g in used] == [(1, 3), (2, 3), (3, 3), (4, 3)]


@pytest.mark.parametrize(
    ("loop", "ds"), [(h.missing_division, 1.6), (h.double_division, 0.4)], ids=["none", "twice"]
)
def test_a_hook_that_does_not_divide_or_divides_twice(loop: Any, ds: float) -> None:
    right = [1, 3, 2, 2, 6, 1]
    for held in gradients(PROBE_T, PLAN_T, loop):
        assert held["s"] == pytest.approx([ds], abs=1e-12)
        assert held["w"] == pytest.approx([x * ds / 0.8 / 15 for x in right], abs=1e-12)


def test_a_sum_in_float16_leaves_its_range() -> None:
    """60000 + 60000 is beyond 65504; 1e-8 and 3e-8 average to less than half of 2**-24."""
    rows = linear([60000.0, 1e-8, 1.0], [60000.0, 3e-8, 3.0])
    for held in gradients(rows, Plan(1, 1, 2), h.fp16_range):
        assert held["v"] == [float("inf"), 0.0, 2.0]


# -- windows: seven microbatches, A = 3

SEVEN = linear(*[[float(i == k) for i in range(7)] for k in range(7)], updates=3)
"""The gradient reads out which microbatch counted how often."""


def seven(**changes: Any) -> Experiment:
    return Experiment(**{**vars(SEVEN), "last_group": "process", **changes})


def test_the_last_of_seven_is_divided_by_3() -> None:
    right = traces(seven(), Plan(1, 3, 1))[0].updates
    wrong = traces(seven(), Plan(1, 3, 1), w.partial_divisor)[0].updates
    assert [float(u.gradient["v"].sum()) for u in right] == pytest.approx([1, 1, 1])
    assert [float(u.gradient["v"].sum()) for u in wrong] == pytest.approx([1, 1, 1 / 3])


def test_the_last_of_seven_is_never_used_in_two_updates_for_three() -> None:
    (trace,) = traces(seven(), Plan(1, 3, 1), w.tail_dropped)
    assert len(trace.updates) == 2
    used = sum(update.gradient["v"] for update in trace.updates)
    assert used.tolist() == pytest.approx([1 / 3] * 6 + [0.0])


def test_the_last_of_seven_joins_the_next_epochs_first_group() -> None:
    (trace,) = traces(seven(updates=6), Plan(1, 3, 1), w.tail_leaks)
    assert len(trace.updates) == 4
    third = trace.updates[2]
    assert [m.ids for m in third.microbatches] == [(6,), (0,), (1,), (2,)]
    assert third.gradient["v"].tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 3 + [1.0])


@pytest.mark.parametrize(
    ("name", "experiment", "plan", "reason"),
    [
        ("window.tail_dropped", seven(), Plan(1, 3, 1), ""),
        ("window.tail_leaks", seven(), Plan(1, 3, 1), "no group follows a shorter last one"),
        ("window.tail_leaks", seven(updates=4), Plan(1, 3, 1), ""),
        ("window.partial_divisor", PROBE_T, PLAN_T, "every group has A microbatches"),
        ("accum.stale_carryover", PROBE_T, PLAN_T, "one update: there is none after it"),
        ("accum.leak_between_optimizers", SEVEN, Plan(1, 7, 1), "the experiment has one optimizer"),
        ("hook.fp16_range", PROBE_T, PLAN_T, "the largest gradient is 0.8, and float16 holds"),
    ],
)
def test_where_it_cannot_show_it_says_why(
    name: str, experiment: Experiment, plan: Plan, reason: str
) -> None:
    told = planted(name).applies(experiment, plan)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


@pytest.mark.parametrize("name", ["window.tail_leaks", "window.partial_divisor", "hook.fp16_range"])
def test_what_cannot_show_is_given_an_experiment_in_which_it_can(name: str) -> None:
    one: Planted = planted(name)
    rows = linear(*[[float(i)] for i in range(1, 13)])
    assert one.applies(rows, Plan(1, 3, 2))
    made = one.plant(rows, Plan(1, 3, 2))
    assert made is not None
    assert not one.applies(made.experiment, Plan(1, 3, 2))
