"""Four ways to run one case: oracle, large batch, replay and candidate."""

from equivtest.arms.candidate import candidate
from equivtest.arms.case import Case
from equivtest.arms.reference import Reference

__all__ = ["Case", "Reference", "candidate"]
