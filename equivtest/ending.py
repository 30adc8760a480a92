"""How a case that could not finish is told: the experiment's mistake, lack of memory, or a rank."""

from __future__ import annotations

from equivtest.calling import ExperimentError
from equivtest.compare.verdict import Failure
from equivtest.outofmemory import LARGE_BATCH, did_not_fit, large_batch_did_not_fit, ran_out
from equivtest.plan import Plan
from equivtest.pool import PoolError, RankFailed

_EXPERIMENT_ERROR = f"{ExperimentError.__module__}.{ExperimentError.__qualname__}"


def failure_of(error: PoolError, plan: Plan, device: str, *, arm: str = "") -> Failure:
    """The failure in words, the answer first.

    Args:
        arm: where it happened, if not in the candidate.
    """
    where = f"in the {arm}: " if arm else ""
    if not isinstance(error, RankFailed):
        return Failure(f"{where}{error}")
    if of_the_experiment(error):  # the same in every arm: no arm is to blame
        return Failure(error.exception_message or "", error.rank, error.what.partition("\n")[0])
    first, _, rest = str(error).partition("\n")
    told = f"{where}{first.rstrip(': ')}{_advice(error, plan, device)}"
    return Failure(f"{told}\n{rest}", error.rank, error.what)


def of_the_experiment(error: RankFailed) -> bool:
    """Whether it is a mistake of the experiment, which any loop stumbles over."""
    return error.exception_type == _EXPERIMENT_ERROR


def out_of_memory(error: RankFailed) -> bool:
    """Whether a rank says that memory ran out."""
    return ran_out(error.exception_type or "", error.exception_message or "")


def _advice(error: RankFailed, plan: Plan, device: str) -> str:
    killed = error.what == "was killed by SIGKILL"
    if not (killed or out_of_memory(error)):
        return ""
    whole = any(event.startswith(LARGE_BATCH) for event in error.last_events)
    text = large_batch_did_not_fit(plan) if whole else did_not_fit(plan, device)
    return f"; if that was for lack of memory: {text}" if killed else f": {text}"
