"""What torch stops at: named from its words where they have one reason, and what to do else."""

from __future__ import annotations

import pytest
import torch
from diagnose.ragged import PLAN, Net, ragged
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest import Plan, Rank, check
from equivtest.diagnose.errors import hint, stopped_by
from equivtest.faults.pieces import accumulated, backward, reducing_last, right


def static(module: nn.Module) -> nn.Module:
    return DistributedDataParallel(module, static_graph=True)


def unscaled_each_time(rank: Rank) -> None:
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            rank.scaler.unscale_(rank.optimizer)
        rank.scaler.step(rank.optimizer)
        rank.scaler.update()
        rank.optimizer.zero_grad()


def left_out_by_hand(rank: Rank) -> None:
    """The first update is left out, and the scaler's update with it: torch says the same then."""
    for group in rank.groups:
        accumulated(rank, group)
        rank.scaler.unscale_(rank.optimizer)
        if group.update:
            rank.scaler.step(rank.optimizer)
            rank.scaler.update()
        rank.optimizer.zero_grad()


def test_a_static_graph_is_named_in_the_first_line_and_can_be_expected() -> None:
    verdict = check(ragged(), PLAN, wrap=static, expect="sync.static_graph")
    assert (verdict.status, verdict.causes, verdict.passed) == (
        "error",
        ("sync.static_graph",),
        True,
    )
    told = verdict.explain().splitlines()
    assert told[0].startswith("error (sync.static_graph)")
    assert any("INTERNAL ASSERT" in line for line in told)


def test_a_static_graph_without_no_sync_is_left_alone() -> None:
    assert check(ragged(), Plan(6, 1, 2), wrap=static).status == "equivalent"


def test_a_second_unscale_is_named() -> None:
    verdict = check(
        ragged(),
        PLAN,
        precision="fp16-mixed",
        loop=unscaled_each_time,
        expect="amp.unscale_per_micro",
    )
    assert verdict.status == "error"
    assert verdict.passed


def test_the_same_words_a_group_later_are_not_its() -> None:
    verdict = check(ragged(), PLAN, precision="fp16-mixed", loop=left_out_by_hand)
    assert (verdict.status, verdict.causes) == ("error", ())


class Unused(Net):
    """With a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.third = torch.nn.Linear(2, 2)


def test_unused_parameters_come_with_what_to_do() -> None:
    verdict = check(ragged(model=Unused), PLAN)
    assert verdict.status == "error"
    told = verdict.explain()
    assert "what to do: a parameter got no gradient" in told


@pytest.mark.parametrize(
    ("message", "last_event"),
    [
        (
            "unscale_() has already been called on this optimizer since the last update().",
            "unscale",
        ),
        ("CUDA error: an illegal memory access was encountered", "backward of microbatch 1"),
    ],
)
def test_other_errors_have_no_cause(message: str, last_event: str) -> None:
    assert stopped_by(message, (last_event,)) is None
    assert hint(message) == ""
