"""The schedule is off: it counts backward passes where updates are meant.

Decay over 12 updates is over after four if the scheduler moves with each of three microbatches.
"""

import pytest
import torch
from letters import letters

from equivtest import Plan

EXPERIMENT = letters(
    name="letters",
    scheduler=lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 12),
    updates=3,
)


def run(rank, per_microbatch):
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch).total / group.count * rank.D
            loss.backward()
            if per_microbatch:
                rank.scheduler.step()
        rank.optimizer.step()
        rank.optimizer.zero_grad()
        if not per_microbatch:
            rank.scheduler.step()


def counts_backwards(rank):
    run(rank, per_microbatch=True)


def counts_updates(rank):
    run(rank, per_microbatch=False)


@pytest.mark.parametrize(
    ("loop", "expect"),
    [(counts_updates, "equivalent"), (counts_backwards, "sched.per_microbatch")],
    ids=["right", "per microbatch"],
)
def test_schedule_that_is_off(equivalence, loop, expect):
    equivalence(EXPERIMENT, Plan(2, 3, 2), loop=loop, expect=expect)
