"""equivtest: is one large batch and its m x A x D decomposition the same experiment?

The names a user imports. ``check`` and what it returns are imported on first use, because they need
torch and this package is also a pytest plugin that every session loads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from equivtest.experiment import Experiment, Group, Loss, Rank
from equivtest.plan import Plan, PlanError, plans

if TYPE_CHECKING:
    from equivtest.check import check
    from equivtest.compare.verdict import Verdict

__all__ = [
    "Experiment",
    "Group",
    "Loss",
    "Plan",
    "PlanError",
    "Rank",
    "Verdict",
    "check",
    "plans",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "check":
        from equivtest.check import check

        return check
    if name == "Verdict":
        from equivtest.compare.verdict import Verdict

        return Verdict
    raise AttributeError(f"module 'equivtest' has no attribute {name!r}")
