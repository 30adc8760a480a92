"""Persistent process groups on this machine: the one stateful place of the package.

A `Pool` keeps processes that have already imported torch. `Pool.run` runs a job once in each of D
ranks of a real gloo process group, `Pool.solo` in one process outside of any group. A rank that
raises, dies or hangs ends that job only, with a `RankFailed` that says which rank and where.
"""

from equivtest.pool.failure import PoolError, RankFailed, Timeout, Unsendable
from equivtest.pool.pool import Pool, current_pool
from equivtest.pool.seat import Seat
from equivtest.pool.shared import Shared
from equivtest.pool.unsendable import where_unsendable

__all__ = [
    "Pool",
    "PoolError",
    "RankFailed",
    "Seat",
    "Shared",
    "Timeout",
    "Unsendable",
    "current_pool",
    "where_unsendable",
]
