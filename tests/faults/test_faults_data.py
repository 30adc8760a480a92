"""Loaders, random numbers, gathered features and kept graphs: the numbers of the field's toys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from faults.probes import Vector, gradients, linear, traces
from torch import Tensor, nn

from equivtest import Experiment, Loss, Plan, Rank
from equivtest.faults import data, logs, losses, memory, planted, rng
from equivtest.faults.pieces import backward, finish
from equivtest.loops import accumulate


def ids(dealer: data.Dealer, rows: int) -> list[list[int]]:
    """What each of two replicas reads in an epoch."""
    read = []
    for r in range(2):
        dataset, sampler = dealer(
            SimpleNamespace(dataset=list(range(rows)), D=2, dp_rank=r),  # type: ignore[arg-type]
            False,
        )
        read.append([dataset[i] for i in sampler])
    return read


def test_the_sampler_deals_the_ids_of_the_field() -> None:
    assert ids(data.dealt, 5) == [[0, 2, 4], [1, 3, 0]]
    assert ids(data.dealt_twice, 8) == [[0, 4], [3, 7]]
    assert ids(data.not_dealt, 4) == [[0, 1, 2, 3], [0, 1, 2, 3]]


def one_hot(n: int, **more: Any) -> Experiment:
    """The gradient of the whole is the share of each example in it."""
    return linear(*torch.eye(n).tolist(), **more)


@pytest.mark.parametrize(
    ("loader", "n", "m", "shares"),
    [
        (data.right, 8, 4, [1, 1, 1, 1, 1, 1, 1, 1]),
        # rank 0 ends with 4 and 6, rank 1 with 5 and, to be as long, 0
        (data.right, 7, 2, [1, 0, 0, 0, 1, 1, 1]),
        (data.double_sharding, 8, 2, [1, 0, 0, 1, 1, 0, 0, 1]),
        (data.not_sharded, 8, 2, [0, 0, 2, 2, 0, 0, 0, 0]),
    ],
    ids=["right", "padded", "sharded twice", "not sharded"],
)
def test_the_examples_of_an_update_are_those_that_the_loader_dealt(
    loader: Callable[[Experiment], Any], n: int, m: int, shares: list[int]
) -> None:
    """In the last update of two, or of the only one."""
    updates = -(-n // (2 * m))
    experiment = one_hot(n, last_group="process", updates=updates)
    plan = Plan(m, 1, 2)
    for held in gradients(experiment, plan, loader(experiment), update=updates - 1):
        assert held["v"] == pytest.approx([s / sum(shares) for s in shares], abs=1e-12)


@pytest.mark.parametrize(("loader", "same"), [(data.right, False), (data.epoch_not_set, True)])
def test_without_its_epoch_the_sampler_repeats_the_order(
    loader: Callable[[Experiment], Any], same: bool
) -> None:
    experiment = one_hot(8, shuffle=True, updates=4)
    (first, *_) = traces(experiment, Plan(2, 1, 2), loader(experiment))
    read = [update.gradient["v"] for update in first.updates]
    assert all(held is not None for held in read)
    assert torch.equal(read[0], read[2]) is same
    assert torch.equal(read[1], read[3]) is same


def masked(model: nn.Module, batch: Tensor) -> Loss:
    return Loss(nn.functional.dropout(model(batch), 0.5).sum(), count=len(batch))


@pytest.mark.parametrize(
    ("loop", "same"), [(accumulate, False), (rng.same_mask_across_replicas, True)]
)
def test_one_seed_everywhere_draws_the_same_numbers(loop: Any, same: bool) -> None:
    rows = linear(*([[1.0]] * 4), loss=masked)
    states = [t.updates[0].microbatches[0].rng for t in traces(rows, Plan(2, 1, 2), loop)]
    first, second = [held.torch for held in states if held is not None]
    assert torch.equal(first, second) is same


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.s * x


def whole(features: Tensor) -> Tensor:
    """A loss in which examples see each other: of f = s on two replicas, s squared."""
    return features.sum().square() / 4


def gathering(rank: Rank, gather: losses.Gather) -> None:
    for group in rank.groups:
        for batch in group:
            backward(rank, whole(gather(rank, rank.model(batch))))
        finish(rank)


@pytest.mark.parametrize(
    ("gather", "ds"),
    [
        (losses.gathered_right, 2.0),
        (losses.gathered_without_gradient, 1.0),
        (losses.gathered_double, 4.0),
    ],
    ids=["right", "without gradient", "double"],
)
def test_gathered_features_give_2_1_and_4(gather: losses.Gather, ds: float) -> None:
    rows = Experiment(
        model=Scalar,
        data=[torch.ones(()), torch.ones(())],
        loss=lambda model, batch: Loss(whole(model(batch)) * len(batch), count=len(batch)),
        count=len,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
        updates=1,
    )
    for held in gradients(rows, Plan(1, 1, 2), partial(gathering, gather=gather)):
        assert held["s"] == [ds]


@pytest.mark.parametrize(
    ("loop", "scale"),
    [(losses.right, 1.0), (losses.gather_no_grad, 0.5), (losses.gather_double, 2.0)],
    ids=["right", "without gradient", "double"],
)
def test_a_wrong_gather_shows_in_the_encoders_and_not_in_the_temperature(
    loop: Any, scale: float
) -> None:
    """Beside the gradient of the whole batch, taken in one process."""
    experiment = losses.pairs(updates=1)
    (right,) = gradients(experiment, Plan(8, 1, 1), losses.right)
    for held in gradients(experiment, Plan(4, 1, 2), loop):
        for name, value in held.items():
            factor = 1.0 if name == "scale" else scale
            assert value == pytest.approx([factor * v for v in right[name]], abs=1e-12)


SQUARES = replace(
    linear(*([[1.0, 2.0]] * 4)),
    loss=lambda model, batch: Loss(model(batch).square().sum(), count=len(batch)),
)


def test_a_deferred_backward_holds_the_graphs_of_all_microbatches() -> None:
    """A = 4 of equal size: four times the bytes of one."""
    (right,) = traces(SQUARES, Plan(1, 4, 1), accumulate)
    (wrong,) = traces(SQUARES, Plan(1, 4, 1), memory.deferred_backward)
    peak = max(m.peak_bytes for m in right.updates[0].microbatches)
    assert peak > 0
    assert max(m.peak_bytes for m in wrong.updates[0].microbatches) == 4 * peak
    same = [t.updates[0].gradient["v"] for t in (right, wrong)]
    assert torch.allclose(*[g for g in same if g is not None], rtol=1e-15)


def test_a_kept_loss_keeps_its_graph_from_one_microbatch_to_the_next() -> None:
    """A loop's variable holds the last one's; saved tensors are gone with the backward."""
    (right,) = traces(SQUARES, Plan(1, 4, 1), accumulate)
    (wrong,) = traces(SQUARES, Plan(1, 4, 1), memory.kept_graph)
    assert max(m.held_graphs for m in right.updates[0].microbatches) <= 1
    assert [m.held_graphs for m in wrong.updates[0].microbatches] == [0, 1, 2, 3]
    assert [m.held_bytes for m in wrong.updates[0].microbatches] == [0] * 4


def logged(model: nn.Module, batch: Tensor) -> Loss:
    """The loss of an example is its second column."""
    return Loss((model(batch[:, :1]) + batch[:, 1]).sum(), count=len(batch))


@pytest.mark.parametrize(
    ("loop", "factor"),
    [(logs.factor_of_accumulations, 1 / 3), (logs.factor_of_replicas, 2.0)],
    ids=["over A", "times D"],
)
def test_only_the_reported_loss_has_the_factor(loop: Any, factor: float) -> None:
    """1 to 6 have the mean 3.5; A = 3, D = 2; the gradient is that of the recipe."""
    rows = linear(
        *([[1.0, float(i)] for i in range(1, 7)]),
        model=partial(Vector, 1),
        loss=logged,
    )
    (right, *_) = gradients(rows, Plan(1, 3, 2), accumulate)
    for trace in traces(rows, Plan(1, 3, 2), loop):
        (update,) = trace.updates
        assert update.reported == pytest.approx((3.5 * factor,), abs=1e-12)
        held = update.gradient["v"]
        assert held is not None
        assert held.tolist() == right["v"]


@pytest.mark.parametrize(
    ("name", "experiment", "plan", "reason"),
    [
        ("data.padding_duplicates", one_hot(8), Plan(2, 2, 2), "the examples come out even over"),
        ("data.epoch_not_set", one_hot(8), Plan(2, 2, 2), "the experiment does not shuffle"),
        (
            "data.epoch_not_set",
            one_hot(8, shuffle=True),
            Plan(2, 2, 2),
            "the updates end before the first epoch does",
        ),
        ("data.not_sharded", one_hot(8), Plan((3, 1), 2, 2), "a loader's microbatches are of one"),
        ("data.not_sharded", one_hot(8), Plan(2, 2, 2), ""),
        ("rng.same_mask_across_replicas", one_hot(8), Plan(2, 2, 2), "the forward draws no random"),
        ("loss.gather_double", one_hot(8), Plan(4, 1, 2), "the loss gathers no features from the"),
        ("loss.gather_double", losses.pairs(), Plan(2, 2, 2), "features are gathered over"),
        ("loss.gather_double", losses.pairs(), Plan(4, 1, 2), ""),
        ("mem.deferred_backward", one_hot(8), Plan(4, 1, 2), "A is 1: there is nothing to"),
        ("mem.kept_graph", one_hot(8), Plan(4, 1, 2), "one microbatch: there is none after it"),
    ],
)
def test_where_it_cannot_show_it_says_why(
    name: str, experiment: Experiment, plan: Plan, reason: str
) -> None:
    told = planted(name).applies(experiment, plan)
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_an_experiment_is_given_the_epochs_that_a_kind_needs() -> None:
    padded = planted("data.padding_duplicates").plant(one_hot(8), Plan(2, 1, 2))
    assert padded is not None
    assert (len(padded.experiment.data), padded.experiment.updates) == (7, 2)
    twice = planted("data.epoch_not_set").plant(one_hot(8), Plan(2, 1, 2))
    assert twice is not None
    assert (len(twice.experiment.data), twice.experiment.updates) == (8, 4)
