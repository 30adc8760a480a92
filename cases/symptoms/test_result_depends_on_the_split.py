"""The result varies with the split: each microbatch is averaged on its own.

``cross_entropy`` with its default reduction is a mean over the letters of *this* microbatch, and a
mean of means counts the letters of a short microbatch more than those of a long one. How much more
depends on how the batch was cut.
"""

import pytest
from letters import PADDING, letters
from torch.nn.functional import cross_entropy

from equivtest import Plan

EXPERIMENT = letters(name="letters")


def loss_of(rank, batch, reduction):
    with rank.autocast():
        logits = rank.model(batch[:, :-1]).flatten(0, 1)
        target = batch[:, 1:].flatten()
        return cross_entropy(logits, target, ignore_index=PADDING, reduction=reduction)


def mean_of_means(rank):
    for group in rank.groups:
        for batch in group:
            (loss_of(rank, batch, "mean") / len(group)).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


def mean_of_all(rank):
    for group in rank.groups:
        for batch in group:
            (loss_of(rank, batch, "sum") / group.count * rank.D).backward()
        rank.optimizer.step()
        rank.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "expect"),
    [(mean_of_all, "equivalent"), (mean_of_means, "norm.mean_of_means_both")],
    ids=["right", "mean of means"],
)
@pytest.mark.parametrize("plan", [Plan(2, 3, 2), Plan(1, 4, 3)], ids=str)
def test_result_depends_on_the_split(equivalence, plan, loop, expect):
    equivalence(EXPERIMENT, plan, loop=loop, expect=expect)
