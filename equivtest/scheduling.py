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
    """Units of work: a test function with all its parameters, or one test without the fixture.

    Workers may die at any moment, several at once, and some while their replacements start. The
    base class then sends work to workers that cannot take it, and xdist swallows the error.
    """

    equivalence_tests: Collection[str] = ()

    def _split_scope(self, nodeid: str) -> str:
        return function_of(nodeid) if nodeid in self.equivalence_tests else nodeid

    def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
        """Take what a worker collected; a replacement that collected other tests ends the run.

        The base class leaves it without work, and its part of the tests without anybody.
        """
        super().add_node_collection(node, collection)
        if node not in self.registered_collections:
            wanted, given = set(self.collection or ()), set(collection)
            missing, new = sorted(wanted - given), sorted(given - wanted)
            pytest.exit(
                f"worker {node.gateway.id} replaced one that died, and collected other tests, or "
                f"in another order: {len(missing)} are missing {missing[:3]}, {len(new)} are new "
                f"{new[:3]}. Collection must not depend on time, on chance or on files that the "
                "tests write.",
                returncode=pytest.ExitCode.TESTS_FAILED,
            )

    def remove_node(self, node: Any) -> str | None:
        """Hand a lost worker's tests on, but for the one that it was running.

        The base class hands that one on as well, and a test that kills its worker kills them all.

        Raises:
            KeyError: the worker was never added, or was not needed (xdist expects this).
        """
        workload = self.assigned_work.pop(node)
        if not self.collection_is_completed:
            # Work is dealt out once so many have collected as there are: the dead do not count.
            self.registered_collections.pop(node, None)
        crashed = next((t for unit in workload.values() for t in unit if not unit[t]), None)
        if crashed is not None:
            workload[self._split_scope(crashed)][crashed] = True
        self.workqueue.update({scope: w for scope, w in workload.items() if False in w.values()})
        if self.workqueue:
            for other in self.nodes:
                self._reschedule(other)
        return crashed

    def _reschedule(self, node: Any) -> None:
        """Leave a worker that still collects alone: ``schedule`` comes back to it.

        A worker begins a test when it has the next one, or knows that there is none: with one
        alone it would wait for ever, as the base class leaves a replacement.
        """
        if node not in self.registered_collections:
            return
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) == 1:
            super()._reschedule(node)

    def _assign_work_unit(self, node: Any) -> None:
        """Keep a unit that cannot be sent: xdist has not heard yet that the worker is gone."""
        scope, unit = next(iter(self.workqueue.items()))
        try:
            super()._assign_work_unit(node)
        except OSError:
            del self.assigned_work[node][scope]
            self.workqueue[scope] = unit


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
