"""The plugin's parts that need no session: scheduling and names."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from equivtest.experiment import Experiment
from equivtest.report import identity
from equivtest.scheduling import ExperimentScheduling, function_of

CASES = [f"t.py::test_a[{k}]" for k in range(4)]
PLAIN = [f"t.py::test_plain[{k}]" for k in range(12)]


class Node:
    """As much of an xdist worker as a scheduler uses."""

    def __init__(self) -> None:
        self.gateway = SimpleNamespace(id="gw")
        self.shutting_down = False
        self.sent: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.sent += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def scheduled(equivalence_tests: list[str], collection: list[str]) -> tuple[Any, list[Node]]:
    options = SimpleNamespace(loadscopereorder=True, maxschedchunk=None)
    config: Any = SimpleNamespace(
        option=options,
        getvalue=lambda name: ["popen", "popen"] if name == "tx" else None,
        getoption=lambda name: None,
    )
    scheduler = ExperimentScheduling(config, None, lambda: equivalence_tests)
    nodes = [Node(), Node()]
    for node in nodes:
        scheduler.add_node(node)
    for node in nodes:
        scheduler.add_node_collection(node, collection)
    assert scheduler.collection_is_completed
    scheduler.schedule()
    return scheduler, nodes


def finish_all(scheduler: Any, nodes: list[Node]) -> list[list[int]]:
    """Let the nodes run what they are sent, turn by turn; what each has run."""
    done: list[list[int]] = [[] for _ in nodes]
    while not scheduler.tests_finished or any(node.sent for node in nodes):
        for node, finished in zip(nodes, done, strict=True):
            if node.sent:
                finished.append(node.sent.pop(0))
                scheduler.mark_test_complete(node, finished[-1])
    return done


def test_cases_of_one_function_go_to_one_worker_and_other_tests_fill_up() -> None:
    scheduler, nodes = scheduled(CASES, [*PLAIN, *CASES])
    done = finish_all(scheduler, nodes)
    assert sorted(done[0] + done[1]) == list(range(16))
    cases = set(range(12, 16))
    assert [len(cases & set(run)) for run in done].count(4) == 1
    assert min(map(len, done)) >= 6


def test_a_session_without_cases_is_scheduled_as_ever() -> None:
    scheduler, nodes = scheduled([], PLAIN)
    assert type(scheduler._inner).__name__ == "LoadScheduling"
    assert sorted(itertools.chain(*finish_all(scheduler, nodes))) == list(range(12))


def test_a_test_that_kills_its_worker_is_not_handed_on() -> None:
    scheduler, (killed, other) = scheduled(CASES, [*CASES, *PLAIN])
    scheduler.mark_test_complete(killed, killed.sent.pop(0))
    assert scheduler.remove_node(killed) == CASES[1]
    (done,) = finish_all(scheduler, [other])
    assert {0, 1}.isdisjoint(done)
    assert {2, 3} <= set(done)


@pytest.mark.parametrize(
    ("nodeid", "function"),
    [
        ("a/t.py::test_x[m1-A2-D2-fp32]", "a/t.py::test_x"),
        ("a/t.py::TestY::test_x[a::b[c]]", "a/t.py::TestY::test_x"),
        ("a[b]/t.py::test_x", "a[b]/t.py::test_x"),
        ("a/t.py", "a/t.py"),
    ],
)
def test_the_function_of_a_node_id(nodeid: str, function: str) -> None:
    assert function_of(nodeid) == function


def experiment(**more: Any) -> Experiment:
    return Experiment(model=Model, data=[], loss=len, optimizer=len, **more)  # type: ignore[arg-type]


class Model:
    """Stands for a module."""


def test_an_experiment_is_called_by_its_name_then_its_variable_then_its_model() -> None:
    made = experiment()
    assert identity.experiment_name(experiment(name="mine"), {}) == "mine"
    assert identity.experiment_name(made, {"other": 1, "ragged": made}) == "ragged"
    assert identity.experiment_name(made, {}) == "Model"


def test_names_of_loops_hold_no_address() -> None:
    def loop() -> None: ...

    assert identity.loop_name(None) == "recipe"
    assert identity.loop_name(functools.partial(loop)) == (
        "test_names_of_loops_hold_no_address.loop"
    )
    assert identity.loop_name(Model()) == "Model"
    assert identity.wrap_name(None) == "DistributedDataParallel"


def test_the_rerun_command_survives_a_shell() -> None:
    command = identity.rerun_command("t.py::test[a b'c]", device="cuda", timeout_s=90.0)
    assert command == """pytest 't.py::test[a b'"'"'c]' --equiv-device=cuda --equiv-timeout=90"""
