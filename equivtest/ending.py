"""How a case ends that could not be judged: whose doing it was, and the verdict that says so."""

from __future__ import annotations

from itertools import starmap

from equivtest.arms import Case
from equivtest.arms.support import refused
from equivtest.calling import BACKEND_REFUSES, NEEDS_GPU, ExperimentError
from equivtest.compare.card import planned_card
from equivtest.compare.verdict import Failure, Finding, Status, Verdict
from equivtest.diagnose.errors import hint, stopped_by
from equivtest.experiment import Experiment
from equivtest.outofmemory import LARGE_BATCH, did_not_fit, large_batch_did_not_fit, ran_out
from equivtest.plan import Plan
from equivtest.pool import Pool, PoolError, RankFailed, Shared, where_unsendable

_EXPERIMENT_ERROR = f"{ExperimentError.__module__}.{ExperimentError.__qualname__}"

REFUSALS = ("NotImplementedError",)
"""Exceptions in equivtest's own recipe that are torch's limits, not mistakes of an experiment."""


def failed(
    pool: Pool,
    experiment: Experiment,
    shared: Shared,
    case: Case,
    failure: RankFailed,
    timeout_s: float | None,
) -> Verdict:
    """``not-run`` if torch refuses the case without any loop as well, ``error`` otherwise."""
    if failure.exception_type is not None and not _out_of_memory(failure):
        try:
            reason = pool.solo(refused, shared, case, timeout_s=timeout_s)
        except RankFailed as alone:
            if _of_the_experiment(alone):  # any loop stumbles over it
                return unfinished(experiment, case, alone)
            reason = None
        words = (failure.exception_message or "").partition("\n")[0]
        limit = failure.exception_type in REFUSALS or words.startswith(BACKEND_REFUSES)
        # The recipe is not at fault, and no loop is where a model wants a GPU.
        told = (case.loop is None and limit) or words.startswith(NEEDS_GPU)
        if reason is None and told:
            reason = f"torch refuses it: {words}"
        if reason is not None:
            return not_run(experiment, case, reason)
    return unfinished(experiment, case, failure)


def not_run(experiment: Experiment, case: Case, reason: str) -> Verdict:
    """The case cannot be run here, for this reason: status ``not-run``."""
    return Verdict(Status.NOT_RUN, planned_card(experiment, case), failure=Failure(text=reason))


def unfinished(experiment: Experiment, case: Case, failure: PoolError, arm: str = "") -> Verdict:
    """The case ended before it could be judged: status ``error``.

    Args:
        arm: where it happened, if not in the candidate.
    """
    told = _failure_of(failure, case.plan, case.device, arm=arm)
    found = () if arm else _causes_of(failure, case.plan)
    return Verdict(Status.ERROR, planned_card(experiment, case), findings=found, failure=told)


def not_sendable(experiment: Experiment, case: Case) -> str:
    """Which argument cannot be sent to a process, and what to do instead."""
    given = {**vars(experiment), "loop": case.loop, "wrap": case.wrap}
    where = next(filter(None, starmap(where_unsendable, given.items())), "the experiment cannot be")
    return f"{where}; make it inside the function, where each rank calls it"


def _causes_of(error: PoolError, plan: Plan) -> tuple[Finding, ...]:
    """What torch stopped at, where its words have one reason."""
    if not isinstance(error, RankFailed) or plan.A == 1:
        return ()  # those that are known take a second microbatch
    stop = stopped_by(error.exception_message or "", error.last_events)
    return () if stop is None else (Finding(stop.cause, stop.text, rank=error.rank),)


def _failure_of(error: PoolError, plan: Plan, device: str, *, arm: str = "") -> Failure:
    """The failure in words, the answer first.

    Args:
        arm: where it happened, if not in the candidate.
    """
    where = f"in the {arm}: " if arm else ""
    if not isinstance(error, RankFailed):
        return Failure(f"{where}{error}")
    if _of_the_experiment(error):  # the same in every arm: no arm is to blame
        text = _with_hint(error.exception_message or "", error)
        return Failure(text, error.rank, error.what.partition("\n")[0])
    first, _, rest = str(error).partition("\n")
    told = f"{where}{first.rstrip(': ')}{_advice(error, plan, device)}"
    return Failure(_with_hint(f"{told}\n{rest}", error), error.rank, error.what)


def _with_hint(text: str, error: RankFailed) -> str:
    """What to do about it below the first line, where torch's own words are known."""
    known = hint(error.exception_message or "")
    first, _, rest = text.partition("\n")
    return f"{first}\n  what to do: {known}\n{rest}" if known else text


def _of_the_experiment(error: RankFailed) -> bool:
    """Whether it is a mistake of the experiment, which any loop stumbles over."""
    return error.exception_type == _EXPERIMENT_ERROR


def _out_of_memory(error: RankFailed) -> bool:
    """Whether a rank says that memory ran out."""
    return ran_out(error.exception_type or "", error.exception_message or "")


def _advice(error: RankFailed, plan: Plan, device: str) -> str:
    killed = error.what == "was killed by SIGKILL"
    if not (killed or _out_of_memory(error)):
        return ""
    whole = any(event.startswith(LARGE_BATCH) for event in error.last_events)
    text = large_batch_did_not_fit(plan) if whole else did_not_fit(plan, device)
    return f"; if that was for lack of memory: {text}" if killed else f": {text}"
