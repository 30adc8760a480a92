"""Accumulation changes nothing: gradients are cleared, or the update runs, too early."""

import pytest
from letters import letters

from equivtest import Plan

EXPERIMENT = letters(name="letters")


def objective(rank, group, batch):
    with rank.autocast():
        return rank.loss(rank.model, batch).total / group.count * rank.D


def cleared_each_time(rank):
    for group in rank.groups:
        for batch in group:
            rank.optimizer.zero_grad()
            objective(rank, group, batch).backward()
        rank.optimizer.step()


def updated_each_time(rank):
    for group in rank.groups:
        for batch in group:
            objective(rank, group, batch).backward()
            rank.optimizer.step()
            rank.optimizer.zero_grad()


def accumulated(rank):
    for group in rank.groups:
        rank.optimizer.zero_grad()
        for batch in group:
            objective(rank, group, batch).backward()
        rank.optimizer.step()


@pytest.mark.parametrize(
    ("loop", "expect"),
    [
        (accumulated, "equivalent"),
        (cleared_each_time, "accum.only_last"),
        (updated_each_time, "opt.update_per_microbatch"),
    ],
    ids=["right", "zero_grad", "update"],
)
def test_accumulation_without_effect(equivalence, loop, expect):
    equivalence(EXPERIMENT, Plan(2, 3, 2), loop=loop, expect=expect)
