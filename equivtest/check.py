"""``check``: the whole pipeline of one case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import starmap
from typing import Any

from equivtest.arguments import an_instance, is_number
from equivtest.arms import Case, candidate
from equivtest.arms.case import case_of
from equivtest.arms.support import refused
from equivtest.calling import BACKEND_REFUSES
from equivtest.compare.card import planned_card
from equivtest.compare.judge import judge
from equivtest.compare.verdict import Expectation, Failure, Status, Verdict, expectation
from equivtest.devices import seated
from equivtest.ending import failure_of, of_the_experiment, out_of_memory
from equivtest.experiment import Experiment, Rank
from equivtest.plan import Plan
from equivtest.pool import (
    Pool,
    PoolError,
    RankFailed,
    Shared,
    Unsendable,
    current_pool,
    where_unsendable,
)
from equivtest.precision import refusal

REFUSALS = ("NotImplementedError",)
"""Exceptions in equivtest's own recipe that are torch's limits, not mistakes of an experiment."""


def check(
    experiment: Experiment,
    plan: Plan,
    *,
    precision: str = "fp32",
    loop: Callable[[Rank], None] | None = None,
    wrap: Callable[[Any], Any] | None = None,
    expect: Expectation = "equivalent",
    device: str = "cpu",
    share_gpus: bool = False,
    timeout_s: float | None = None,
    pool: Pool | None = None,
) -> Verdict:
    """Run ``experiment`` under ``plan`` on real process groups and judge the split and the loop.

    Args:
        precision: ``fp64 fp32 tf32 bf16 fp16 bf16-mixed fp16-mixed``.
        loop: the code under test, ``Rank -> None``; equivtest's recipe if left out.
        wrap: ``module -> wrapped``; ``DistributedDataParallel`` if left out.
        expect: a status, a cause or a set of causes; decides ``Verdict.passed``.
        device: ``cpu``, or ``cuda``: NCCL, and a GPU for each replica.
        share_gpus: let replicas share GPUs, on gloo, where there are more of them.
        timeout_s: seconds that the ranks may take; the pool's own limit if left out.

    Returns:
        The verdict. A case that cannot finish has status ``error``; nothing is raised for it.

    Raises:
        ValueError, TypeError: an argument that cannot be; says what was given and what to pass.
        PlanError: the plan does not fit the data.
    """
    began = time.perf_counter()
    expected = expectation(expect)
    if timeout_s is not None and not (is_number(timeout_s) and 0 < timeout_s < math.inf):
        raise ValueError(f"timeout_s={timeout_s!r}: pass a number of seconds above 0, or None")
    if pool is not None:
        an_instance("pool", pool, Pool, "an equivtest.pool.Pool, or None for the session's own")
    case = case_of(experiment, plan, precision=precision, loop=loop, wrap=wrap, device=device)
    shared = Shared(experiment)  # anew each time: what a caller changed in between must be seen
    try:
        case = replace(case, digest=shared.digest)
        verdict = _verdict(pool or current_pool(), experiment, shared, case, share_gpus, timeout_s)
    except Unsendable:
        raise TypeError(_not_sendable(experiment, case)) from None
    return replace(verdict, expect=expected, duration_s=time.perf_counter() - began)


def _verdict(
    pool: Pool,
    experiment: Experiment,
    shared: Shared,
    case: Case,
    share_gpus: bool,
    timeout_s: float | None,
) -> Verdict:
    try:
        placed = _placed(pool, case, share_gpus)
        if isinstance(placed, str):
            return _not_run(experiment, case, placed)
        case, D, seating = placed, placed.plan.D, placed.seating
        traces = pool.run(
            candidate, shared, case, D=D, seating=seating, timeout_s=timeout_s, sealed=True
        )
    except Unsendable:
        raise
    except RankFailed as failure:
        return _failed(pool, experiment, shared, case, failure, timeout_s)
    except PoolError as failure:
        return _error(experiment, case, failure)
    try:
        return pool.solo(judge, shared, case, traces, timeout_s=timeout_s)
    except PoolError as failure:
        return _error(experiment, case, failure, arm="reference arms")


def _failed(
    pool: Pool,
    experiment: Experiment,
    shared: Shared,
    case: Case,
    failure: RankFailed,
    timeout_s: float | None,
) -> Verdict:
    """``not-run`` if torch refuses the case without any loop as well, ``error`` otherwise."""
    if failure.exception_type is not None and not out_of_memory(failure):
        try:
            reason = pool.solo(refused, shared, case, timeout_s=timeout_s)
        except RankFailed as alone:
            if of_the_experiment(alone):  # any loop stumbles over it
                return _error(experiment, case, alone)
            reason = None
        words = (failure.exception_message or "").partition("\n")[0]
        limit = failure.exception_type in REFUSALS or words.startswith(BACKEND_REFUSES)
        if reason is None and case.loop is None and limit:  # the recipe is not at fault
            reason = f"torch refuses it: {words}"
        if reason is not None:
            return _not_run(experiment, case, reason)
    return _error(experiment, case, failure)


def _not_run(experiment: Experiment, case: Case, reason: str) -> Verdict:
    return Verdict(Status.NOT_RUN, planned_card(experiment, case), failure=Failure(text=reason))


def _error(experiment: Experiment, case: Case, failure: PoolError, arm: str = "") -> Verdict:
    told = failure_of(failure, case.plan, case.device, arm=arm)
    return Verdict(Status.ERROR, planned_card(experiment, case), failure=told)


def _not_sendable(experiment: Experiment, case: Case) -> str:
    given = {**vars(experiment), "loop": case.loop, "wrap": case.wrap}
    where = next(filter(None, starmap(where_unsendable, given.items())), "the experiment cannot be")
    return f"{where}; make it inside the function, where each rank calls it"


def _placed(pool: Pool, case: Case, share_gpus: bool) -> Case | str:
    """The case where it will run, or why it cannot."""
    plan = case.plan
    if plan.processes != plan.D:
        return f"{plan} spans {plan.processes // plan.D} processes a replica: only D is run here"
    if case.device == "cpu":
        return refusal(case.precision, case.device) or case
    machine = pool.machine()
    seating = seated(plan.D, machine, share_gpus)
    if isinstance(seating, str):
        return seating
    capability = machine.own[0].capability
    return refusal(case.precision, case.device, capability) or replace(case, seating=seating)
