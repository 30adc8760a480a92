"""Whether torch can run a case's forward and backward at all, asked without any loop."""

from __future__ import annotations

from equivtest.arms.build import deterministic
from equivtest.arms.case import Case
from equivtest.arms.reference import Reference
from equivtest.batches import CountError
from equivtest.experiment import Experiment
from equivtest.pool import Seat


def refused(seat: Seat, experiment: Experiment, case: Case) -> str | None:
    """Torch's own words if it refuses the case's microbatches in its precision, else None.

    Each microbatch shape of the plan is tried in the case's precision. What float64 refuses for one
    large batch as well is a mistake in the experiment, not a limit of torch.

    Raises:
        CountError: the experiment counts other terms than its loss has.
    """
    reference = Reference(seat.cache, experiment, case)
    with deterministic():
        try:
            reference.try_whole(case.groups[0])
        except CountError:
            raise
        except Exception:  # the experiment itself fails: the case's own traceback says how
            return None
        try:
            for group in case.groups:
                reference.try_microbatches(group)
        except (RuntimeError, NotImplementedError, ValueError, IndexError) as error:
            return f"torch refuses it in {case.precision.name}: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
