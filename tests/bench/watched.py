"""The candidate's arm with its observer, and the same arm with nobody watching.

In seconds of a processor: what other processes do on the machine would drown the difference.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

from equivtest import Experiment, Plan, Rank
from equivtest.arms.case import Case, case_of
from equivtest.judging.judge import judge
from equivtest.observe import Trace
from equivtest.pool import Seat, Shared
from equivtest.pool.codec import encode

arm = importlib.import_module("equivtest.arms.candidate")  # its package has the function's name


class Nobody:
    """In the observer's place: it watches nothing and leaves nothing."""

    def __init__(self, rank: Rank, *_: Any) -> None:
        self.rank = rank.dp_rank

    def watched_loss(self, model: Any, batch: Any) -> None:
        """Never called; an error in the loss is told by its name."""

    def fetched(self, batch: Any, ids: tuple[int, ...]) -> Any:
        return batch

    def watching(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def loop_ended(self, optimizers: Sequence[Any]) -> None:
        """Nothing to note."""

    def trace(self) -> Trace:
        return Trace(rank=self.rank)


def unwatched(seat: Seat, experiment: Experiment, case: Case) -> Trace:
    with mock.patch.object(arm, "Observer", Nobody):
        trace: Trace = arm.candidate(seat, experiment, case)
        return trace


def candidates(seat: Seat, experiment: Experiment, case: Case) -> tuple[float, float]:
    """Seconds of this rank's processor, watched and not, until what is left can travel."""
    return tuple(  # type: ignore[return-value]
        _seconds(lambda: encode(run(seat, experiment, case)))  # noqa: B023
        for run in (arm.candidate, unwatched)
    )


def judging(seat: Seat, experiment: Experiment, case: Case, traces: Sequence[Trace]) -> float:
    """Seconds of the processor that judges what the ranks have left."""
    return _seconds(lambda: judge(seat, experiment, case, traces))


def _seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def case(experiment: Experiment, shared: Shared, plan: Plan) -> Case:
    """The recipe under ``plan`` in float32."""
    made = case_of(experiment, plan, precision="fp32", loop=None, wrap=None, device="cpu")
    return replace(made, digest=shared.digest)
