"""``check``: the whole pipeline of one case."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from equivtest.arguments import an_instance, is_number
from equivtest.arms import Case, candidate
from equivtest.arms.case import case_of
from equivtest.arms.placing import placed
from equivtest.compare.verdict import Expectation, Verdict, expectation
from equivtest.ending import failed, not_run, not_sendable, unfinished
from equivtest.experiment import Experiment, Rank
from equivtest.judging.judge import judge
from equivtest.plan import Plan
from equivtest.pool import Pool, PoolError, RankFailed, Shared, Unsendable, current_pool
from equivtest.settling import settled

LEAST_PATIENCE_S = 20.0
"""At least so long may a planted fault run until it is taken to hang."""

PATIENCE = 20.0
"""And as many times as long as the case itself took."""


def check(
    experiment: Experiment,
    plan: Plan,
    *,
    precision: str = "fp32",
    loop: Callable[[Rank], None] | None = None,
    wrap: Callable[[Any], Any] | None = None,
    expect: Expectation = "equivalent",
    isolate: str = "auto",
    device: str = "cpu",
    share_gpus: bool = False,
    timeout_s: float | None = None,
    sensitivity: bool = False,
    pool: Pool | None = None,
) -> Verdict:
    """Run ``experiment`` under ``plan`` on real process groups and judge the split and the loop.

    Args:
        precision: ``fp64 fp32 tf32 bf16 fp16 bf16-mixed fp16-mixed``.
        loop: the code under test, ``Rank -> None``; equivtest's recipe if left out.
        wrap: ``module -> wrapped``; ``DistributedDataParallel`` if left out.
        expect: a status, a cause or a set of causes; decides ``Verdict.passed``.
        isolate: isolate the known sources of divergence where the case diverges (``auto``),
            ``always`` or ``never``.
        device: ``cpu``, or ``cuda``: NCCL, and a GPU for each replica.
        share_gpus: let replicas share GPUs, on gloo, where there are more of them.
        timeout_s: seconds that the ranks may take; the pool's own limit if left out.
        sensitivity: also run the planted faults in this experiment, plan and precision, some
            seventy runs: ``Verdict.sensitivity`` says which would be caught.

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
    where: dict[str, Any] = {
        "precision": precision,
        "device": device,
        "share_gpus": share_gpus,
        "pool": pool,
    }
    once: Callable[..., Verdict] = partial(
        _once, loop=loop, wrap=wrap, timeout_s=timeout_s, **where
    )
    verdict = once(experiment, plan, isolate=isolate)
    verdict = settled(verdict, experiment, plan, partial(once, isolate="never"))
    verdict = replace(verdict, expect=expected, duration_s=time.perf_counter() - began)
    if not sensitivity:
        return verdict
    from equivtest.sensitivity import measure  # and all planted faults, which few sessions need

    patience = timeout_s or max(LEAST_PATIENCE_S, PATIENCE * verdict.duration_s)
    planted = partial(check, experiment, plan, isolate="never", timeout_s=patience, **where)
    return replace(verdict, sensitivity=measure(planted, experiment, plan, precision))


def _once(
    experiment: Experiment,
    plan: Plan,
    *,
    loop: Callable[[Rank], None] | None,
    wrap: Callable[[Any], Any] | None,
    isolate: str,
    precision: str,
    device: str,
    share_gpus: bool,
    timeout_s: float | None,
    pool: Pool | None,
) -> Verdict:
    """One run of the loop, judged."""
    case = case_of(
        experiment,
        plan,
        precision=precision,
        loop=loop,
        wrap=wrap,
        device=device,
        isolate=isolate,
    )
    shared = Shared(experiment)  # anew each time: what a caller changed in between must be seen
    try:
        case = replace(case, digest=shared.digest)
        return _verdict(pool or current_pool(), experiment, shared, case, share_gpus, timeout_s)
    except Unsendable:
        raise TypeError(not_sendable(experiment, case)) from None


def _verdict(
    pool: Pool,
    experiment: Experiment,
    shared: Shared,
    case: Case,
    share_gpus: bool,
    timeout_s: float | None,
) -> Verdict:
    try:
        found = placed(pool, case, share_gpus)
        if isinstance(found, str):
            return not_run(experiment, case, found)
        case, D, seating = found, found.plan.D, found.seating
        traces = pool.run(
            candidate, shared, case, D=D, seating=seating, timeout_s=timeout_s, sealed=True
        )
    except Unsendable:
        raise
    except RankFailed as failure:
        return failed(pool, experiment, shared, case, failure, timeout_s)
    except PoolError as failure:
        return unfinished(experiment, case, failure)
    try:
        return pool.solo(judge, shared, case, traces, timeout_s=timeout_s)
    except PoolError as failure:
        return unfinished(experiment, case, failure, arm="reference arms")
