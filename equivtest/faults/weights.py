"""One microbatch that counts a little more than it should: how small an error is still seen."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.experiment import Rank
from equivtest.faults.pieces import backward, finish, reducing_last, right


@dataclass(frozen=True)
class WeightError:
    """One microbatch of one update counts ``1 + error`` times."""

    update: int
    replica: int
    microbatch: int
    error: float

    def __call__(self, rank: Rank) -> None:
        for group in rank.groups:
            for k, batch in enumerate(group):
                with reducing_last(rank, group, k):
                    objective = right(rank, group, batch)
                    here = (group.update, rank.dp_rank, k)
                    if here == (self.update, self.replica, self.microbatch):
                        objective = objective * (1 + self.error)
                    backward(rank, objective)
            finish(rank)
