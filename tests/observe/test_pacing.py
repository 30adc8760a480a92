"""Schedulers, averages and reports: when they come, beside microbatches and the attempt."""

from typing import Any

import pytest
import torch
from ranks import a_rank, weight
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from watching import numbers, observed

from equivtest import Rank
from equivtest.loops import accumulate
from equivtest.observe import Trace

TWO = numbers([[1.0], [2.0]], [[3.0], [4.0]])


def when(trace: Trace, kind: str) -> list[tuple[int, int, bool]]:
    """Update, microbatches begun, and whether the update had been attempted."""
    return [(e.update, e.begun, e.attempted) for e in trace.events if e.kind == kind]


def scheduled(make: Any, unit: str = "applied", loop: Any = accumulate) -> Trace:
    module = weight()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    rank = a_rank(module, optimizer=optimizer, scheduler=make(optimizer), scheduler_unit=unit)
    return observed(loop, rank, TWO)


def halved(optimizer: Any) -> Any:
    return lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


class Own:
    """Moves the rate itself, and is no scheduler of torch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] /= 2


class Through(lr_scheduler.StepLR):
    def step(self, epoch: Any = None) -> None:
        super().step()


KINDS = {
    "torch": halved,
    "own": Own,
    "derived": lambda o: Through(o, 1, gamma=0.5),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)]
    ),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 1)], milestones=[1]
    ),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_a_scheduler_of_any_kind_moves_once(make: Any) -> None:
    assert when(scheduled(make), "scheduler") == [(0, 2, True), (1, 2, True)]


def test_a_plateau_moves_with_its_metric() -> None:
    def loop(rank: Rank) -> None:
        for group in rank.groups:
            for batch in group:
                rank.loss(rank.model, batch).total.backward()
            rank.optimizer.step()
            rank.scheduler.step(1.0)

    trace = scheduled(lr_scheduler.ReduceLROnPlateau, loop=loop)
    assert when(trace, "scheduler") == [(0, 2, True), (1, 2, True)]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # as it is asked to
def test_a_scheduler_that_moves_between_microbatches_says_after_which() -> None:
    trace = scheduled(halved, unit="microbatch")
    assert when(trace, "scheduler") == [(0, 1, False), (0, 2, False), (1, 1, False), (1, 2, False)]
    details = [e.detail for e in trace.events if e.kind == "scheduler"]
    assert details == ["lr 0.5", "lr 0.25", "lr 0.125", "lr 0.0625"]


def test_a_scheduler_that_the_loop_makes_has_not_moved_by_that() -> None:
    def makes(rank: Rank) -> None:
        halved(rank.optimizer)
        accumulate(rank)

    assert when(observed(makes, a_rank(weight()), TWO), "scheduler") == []


class Shadow(AveragedModel):
    def update_parameters(self, model: Any) -> None:
        super().update_parameters(model)


class OwnShadow(torch.nn.Module):
    def update_parameters(self, model: Any) -> None:
        pass


@pytest.mark.parametrize("make", [AveragedModel, Shadow, lambda module: OwnShadow()])
def test_an_average_of_any_kind_moves_once(make: Any) -> None:
    module = weight()
    trace = observed(accumulate, a_rank(module, average=make(module)), TWO)
    assert when(trace, "average") == [(0, 2, True), (1, 2, True)]


def test_every_event_says_where_it_stands_in_its_group() -> None:
    trace = observed(accumulate, a_rank(weight(), clip_norm=1.0), TWO[:1])
    assert [(e.kind, e.begun, e.attempted) for e in trace.events] == [
        ("forward", 1, False),
        ("backward", 1, False),
        ("forward", 2, False),
        ("backward", 2, False),
        ("clip", 2, False),
        ("update attempted", 2, True),
        ("update applied", 2, True),
        ("zero_grad", 2, True),
    ]


# -- what the loop reports


def test_a_report_goes_to_the_update_that_is_open_or_was_just_attempted() -> None:
    def reports(rank: Rank) -> None:
        for group in rank.groups:
            running = torch.zeros(())
            for batch in group:
                loss = rank.loss(rank.model, batch).total
                loss.backward()
                running += loss.detach()
                rank.report(running)
            rank.optimizer.step()
            rank.report(-1)

    trace = observed(reports, a_rank(weight(1.0)), TWO)
    # The weight is 1 and then 1 - (1 + 2).
    assert [u.reported for u in trace.updates] == [(1.0, 3.0, -1.0), (-6.0, -14.0, -1.0)]


def test_a_report_needs_no_observer() -> None:
    assert a_rank(weight()).report(torch.ones(1)) is None


@pytest.mark.parametrize(
    ("loss", "error"), [("0.5", TypeError), (None, TypeError), (torch.ones(2), ValueError)]
)
def test_a_report_of_no_number_is_refused(loss: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"rank\.report"):
        a_rank(weight()).report(loss)
