"""Whether torch can run a case's forward and backward at all, asked without any loop."""

from __future__ import annotations

import re

from equivtest.arms.case import Case
from equivtest.arms.computing import computing
from equivtest.arms.reference import Reference
from equivtest.calling import ExperimentError
from equivtest.experiment import Experiment
from equivtest.pool import Seat

NOT_DETERMINISTIC = "does not have a deterministic implementation"
"""How torch words that an operation has no kernel that gives the same bits twice, in any dtype."""

TOO_FEW = "Expected more than 1 value per channel"
"""How torch words that a layer has nothing to take statistics of."""

LIMITS = re.compile(
    r"not implemented|not supported|unsupported|does not support|could not (run|create)|"
    rf"{TOO_FEW}|{NOT_DETERMINISTIC}",
    re.IGNORECASE,
)
"""How torch words what it cannot run: a dtype without kernel, a batch too small for a layer."""

TORCH_RAISES = (RuntimeError, ValueError, IndexError)
"""NotImplementedError is a RuntimeError."""


def refused(seat: Seat, experiment: Experiment, case: Case) -> str | None:
    """Torch's own words if it refuses the case's microbatches in its precision, else None.

    Each microbatch shape of the plan is tried in the case's precision. What one large batch in
    float64 refuses as well is a mistake in the experiment, not a limit of torch, unless it is an
    operation without a deterministic kernel, or statistics of one example; and so is what is not
    worded as a limit (dtypes that do not match, shapes that do not fit).

    Raises:
        ExperimentError: the experiment is not one, without any loop.
    """
    reference = Reference(seat.cache, experiment, case, seat.note)
    with computing(case):
        try:
            reference.try_whole(case.groups[0])
        except ExperimentError:
            raise
        except Exception as error:  # the experiment fails: the case's own traceback says how
            return _refused_determinism(error) or _refused_alone(error, case)
        try:
            for group in case.groups:
                reference.try_microbatches(group)
        except TORCH_RAISES as error:
            limit = isinstance(error, NotImplementedError) or LIMITS.search(str(error))
            if limit or _refuses_no_examples(reference, case):
                return f"torch refuses it in {case.precision.name}: {_first_line(error)}"
    return None


def _refused_determinism(error: Exception) -> str | None:
    if NOT_DETERMINISTIC not in str(error):
        return None
    return f"torch refuses it where the same bits are wanted twice: {_first_line(error)}"


def _refused_alone(error: Exception, case: Case) -> str | None:
    """One example is a whole update, and a layer takes statistics of no fewer than two."""
    if TOO_FEW not in str(error) or len(case.groups[0].flat) > 1:
        return None
    return f"torch refuses an update of one example: {_first_line(error)}"


def _refuses_no_examples(reference: Reference, case: Case) -> bool:
    """The plan has a microbatch without examples, and the model cannot run one."""
    if all(n for group in case.groups for replica in group.shape for n in replica):
        return False
    try:
        reference.try_no_examples()
    except TORCH_RAISES:
        return True
    return False


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
