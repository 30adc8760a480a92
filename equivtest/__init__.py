"""equivtest: is one large batch and its m x A x D decomposition the same experiment?

The names a user imports. ``check`` and what it returns are imported on first use, because they need
torch and this package is also a pytest plugin that every session loads.
"""

from __future__ import annotations

import sys
from types import ModuleType
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


class _Package(ModuleType):
    """This package, in which ``check`` is always the function.

    Importing the submodule of the same name would otherwise put the module in its place.
    """

    @property
    def check(self) -> Any:
        from equivtest.check import check

        return check

    @check.setter
    def check(self, submodule: ModuleType) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name == "Verdict":
            from equivtest.compare.verdict import Verdict

            return Verdict
        raise AttributeError(f"module 'equivtest' has no attribute {name!r}")


sys.modules[__name__].__class__ = _Package
