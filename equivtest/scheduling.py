"""How cases are dealt to xdist workers: those of one test function to one worker.

A test function has one experiment, and a worker that runs all its plans shares oracle and pool.
Tests without the fixture go wherever there is room; a session without any is scheduled as if this
module were not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling, LoadScopeScheduling


class _ByFunction(LoadScopeScheduling):
    """Units of work: a test function with all its parameters, or one test without the fixture."""

    equivalence_tests: Collection[str] = ()

    def _split_scope(self, nodeid: str) -> str:
        return function_of(nodeid) if nodeid in self.equivalence_tests else nodeid

    def remove_node(self, node: Any) -> str | None:
        """Hand a lost worker's tests on, but for the one that it was running.

        The base class hands that one on as well, and a test that kills its worker kills them all.
        """
        workload = self.assigned_work.pop(node)
        pending = [
            (unit, nodeid) for unit in workload.values() for nodeid in unit if not unit[nodeid]
        ]
        if not pending:
            return None
        unit, crashed = pending[0]
        unit[crashed] = True
        self.workqueue.update({scope: w for scope, w in workload.items() if False in w.values()})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


class ExperimentScheduling:
    """xdist's ``Scheduling``, settled when the first worker has said what it collected.

    ``equivalence_tests`` is asked then for the node ids of the tests that use the fixture.
    """

    def __init__(
        self, config: pytest.Config, log: Any, equivalence_tests: Callable[[], Collection[str]]
    ) -> None:
        self._inner: LoadScopeScheduling | LoadScheduling = _ByFunction(config, log)
        self._new_plain = lambda: LoadScheduling(config, log)
        self._ask = equivalence_tests
        self._settled = False

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        if not self._settled:
            self._settle()
        self._inner.add_node_collection(node, collection)

    def _settle(self) -> None:
        self._settled = True
        tests = frozenset(self._ask())
        if tests and isinstance(self._inner, _ByFunction):
            self._inner.equivalence_tests = tests
            return
        nodes = self._inner.nodes
        self._inner = self._new_plain()
        for node in nodes:
            self._inner.add_node(node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def function_of(nodeid: str) -> str:
    """``file::Class::function`` of a node id, without its parameters."""
    path, separator, rest = nodeid.partition("::")
    return path + separator + rest.partition("[")[0]
