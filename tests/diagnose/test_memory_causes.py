"""Costs are noted on a case that stays equivalent; what costs nothing more is not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diagnose.ragged import PLAN, ragged

from equivtest import Plan, Rank, check
from equivtest.faults.pieces import averaged, backward, finish, reducing_last, right


def reduced_each_time(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            backward(rank, right(rank, group, batch))
        finish(rank)


def reduced_once_by_hand(rank: Rank) -> None:
    for group in rank.groups:
        for batch in group:
            with rank.model.no_sync():
                backward(rank, right(rank, group, batch))
        averaged(rank)
        finish(rank)


def deferred(rank: Rank) -> None:
    for group in rank.groups:
        objective = torch.stack([right(rank, group, batch) for batch in group]).sum()
        backward(rank, objective)
        finish(rank)


@dataclass(frozen=True)
class Keeping:
    """Something of each microbatch is kept, over the run or for the log of a group."""

    what: str
    per_group: bool = False

    def __call__(self, rank: Rank) -> None:
        kept: list[Any] = []
        for group in rank.groups:
            if self.per_group:
                kept = []
            for k, batch in enumerate(group):
                with reducing_last(rank, group, k):
                    objective = right(rank, group, batch)
                    backward(rank, objective)
                kept.append(
                    objective
                    if self.what == "loss"
                    else objective.detach()
                    if self.what == "detached"
                    else rank.module(batch["x"])
                )
            finish(rank)


def held_by_its_variable(rank: Rank) -> None:
    """The last microbatch's loss is there until the next one's takes its name."""
    objective = None
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                objective = right(rank, group, batch)
                backward(rank, objective)
        finish(rank)
    assert objective is not None


def noted(plan: Plan, loop: object, **more: object) -> tuple[str, ...]:
    verdict = check(ragged(**more), plan, loop=loop)  # type: ignore[arg-type]
    assert verdict.status == "equivalent", verdict.explain()
    return verdict.noted


def test_a_reduction_for_each_microbatch_is_a_cost() -> None:
    verdict = check(ragged(), PLAN, loop=reduced_each_time, expect="sync.extra")
    assert (verdict.status, verdict.passed) == ("equivalent", True)
    note = next(note for note in verdict.notes if note.startswith("sync.extra"))
    assert "reduced 3 times in update 0" in note  # A = 3


@pytest.mark.parametrize(
    ("plan", "loop"),
    [
        (PLAN, None),
        (PLAN, reduced_once_by_hand),
        (Plan(6, 1, 2), reduced_each_time),
        (Plan(4, 3, 1), reduced_each_time),
        (PLAN, held_by_its_variable),
        (PLAN, Keeping("detached")),
        (Plan((1, 2, 3), 3, 2), held_by_its_variable),
    ],
)
def test_what_costs_nothing_more_is_not_noted(plan: Plan, loop: object) -> None:
    assert noted(plan, loop) == ()


def test_one_backward_for_a_group_is_a_cost() -> None:
    verdict = check(ragged(), PLAN, loop=deferred, expect="mem.deferred_backward")
    assert (verdict.status, verdict.passed) == ("equivalent", True), verdict.explain()
    assert verdict.noted == ("mem.deferred_backward",)
    assert any("reached 3 microbatches" in note for note in verdict.notes)


@pytest.mark.parametrize(
    "loop", [Keeping("loss"), Keeping("output"), Keeping("loss", per_group=True)], ids=str
)
def test_kept_graphs_are_a_cost(loop: Keeping) -> None:
    assert noted(PLAN, loop) == ("mem.kept_graph",)


def test_a_kept_loss_holds_no_bytes_and_a_kept_output_does() -> None:
    """After backward nodes remain; what never saw one holds its activations."""
    notes = {
        what: next(n for n in check(ragged(), PLAN, loop=Keeping(what)).notes if "kept_graph" in n)
        for what in ("loss", "output")
    }
    assert "5 in the end, with 0 saved tensors of 0 bytes" in notes["loss"]  # the sixth sees five
    assert "of 0 bytes" not in notes["output"]
