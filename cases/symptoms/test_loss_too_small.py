"""The loss is unusually small: it is divided twice.

A mean is divided by the number of accumulations. A sum over the group's count is the group's mean
already, and divided by the number of accumulations again it is a small loss with a small gradient.
AdamW does not even see it in its first update: parameters look right.
"""

import pytest
from letters import letters

from equivtest import Plan

EXPERIMENT = letters(name="letters")


def divided_twice(rank):
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch).total / group.count * rank.D
            (loss / len(group)).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def divided_once(rank):
    for group in rank.groups:
        for batch in group:
            with rank.autocast():
                loss = rank.loss(rank.model, batch).total / group.count * rank.D
            loss.backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "expect"),
    [(divided_once, "equivalent"), (divided_twice, "norm.double_accum_division")],
    ids=["right", "twice"],
)
def test_loss_too_small(equivalence, loop, expect):
    equivalence(EXPERIMENT, Plan(2, 3, 2), loop=loop, expect=expect)
