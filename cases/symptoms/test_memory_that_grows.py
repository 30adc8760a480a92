"""Memory grows with every microbatch: something keeps the graph alive.

The numbers are right, so this is a note on an equivalent case: ``expect`` takes its name all the
same, and then the case fails when the note does not appear.
"""

import pytest
from letters import letters

from equivtest import Plan

EXPERIMENT = letters(name="letters")


def run(rank, keep):
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch).total / group.count * rank.D
            loss.backward()
            keep(loss)
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def losses_kept(rank):
    kept = []
    run(rank, kept.append)


def numbers_kept(rank):
    kept = []
    run(rank, lambda loss: kept.append(loss.item()))


@pytest.mark.parametrize(
    ("loop", "expect"),
    [(numbers_kept, "equivalent"), (losses_kept, "mem.kept_graph")],
    ids=["right", "kept"],
)
def test_memory_that_grows(equivalence, loop, expect):
    equivalence(EXPERIMENT, Plan(2, 3, 2), loop=loop, expect=expect)
