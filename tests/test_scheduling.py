"""Which worker runs which test, whatever dies when."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_workers import Controller, Worker

from equivtest.scheduling import function_of

CASES = [f"t.py::test_a[{k}]" for k in range(4)]
OTHERS = [f"t.py::test_b[{k}]" for k in range(3)]
PLAIN = [f"t.py::test_plain[{k}]" for k in range(12)]


def started(controller: Controller) -> list[str]:
    return sorted(itertools.chain(*(worker.started for worker in controller.workers)))


def finished(controller: Controller) -> list[str]:
    return sorted(itertools.chain(*(worker.finished for worker in controller.workers)))


def until(controller: Controller, worker: Worker, *, started: int) -> None:
    """Let all others wait while this worker comes to begin so many tests."""
    while len(worker.started) < started:
        worker.move()
        controller.hear_all()


def collected(controller: Controller) -> None:
    """Everybody there has said what it collected, and has got work."""
    for worker in controller.workers:
        worker.move()
        worker.move()
    controller.hear_all()


def lose(controller: Controller, worker: Worker, *, deaf: bool = False) -> None:
    worker.die(deaf=deaf)
    worker.mourn()
    controller.hear_all()


def test_cases_of_one_function_go_to_one_worker_and_other_tests_fill_up() -> None:
    controller = Controller(CASES, [*PLAIN, *CASES])
    controller.run()
    assert started(controller) == sorted([*PLAIN, *CASES])
    shares = [len(set(CASES) & set(worker.started)) for worker in controller.workers]
    assert sorted(shares) == [0, 4]
    assert min(len(worker.started) for worker in controller.workers) >= 6


def test_a_session_without_cases_is_scheduled_as_ever() -> None:
    controller = Controller([], PLAIN)
    controller.run()
    assert type(controller.scheduler._inner).__name__ == "LoadScheduling"
    assert started(controller) == sorted(PLAIN)


def test_a_test_that_kills_its_worker_is_not_handed_on() -> None:
    controller = Controller(CASES, [*CASES, *PLAIN])
    collected(controller)
    killed, other = controller.workers
    until(controller, killed, started=2)
    lose(controller, killed)
    controller.run()
    assert controller.crashed == [CASES[1]]
    assert other.started != []
    assert started(controller) == sorted([*CASES, *PLAIN])


def test_a_worker_that_dies_while_the_replacement_of_another_collects() -> None:
    """The one that collects cannot be sent anything yet, and must not be shut down with it."""
    controller = Controller([*CASES, *OTHERS], [*CASES, *OTHERS])
    collected(controller)
    first, second = controller.workers
    until(controller, first, started=2)
    lose(controller, first)
    replacement = controller.workers[2]
    replacement.move()  # ready, and collecting
    controller.hear_all()
    until(controller, second, started=1)
    lose(controller, second)
    controller.run()
    assert controller.crashed == [CASES[1], OTHERS[0]]
    assert finished(controller) == sorted([CASES[0], *CASES[2:], *OTHERS[1:]])


def test_a_worker_that_dies_after_it_collected_and_before_others_did() -> None:
    """Its replacement is waited for, like any worker that has not said what it collected."""
    controller = Controller([*CASES, *OTHERS], [*CASES, *OTHERS])
    first, second = controller.workers
    for _ in range(2):
        first.move()
    controller.hear_all()
    lose(controller, first)
    controller.workers[2].move()  # the replacement is ready, and collecting
    for _ in range(2):
        second.move()
    controller.hear_all()
    controller.run()
    assert controller.crashed == []
    assert finished(controller) == sorted([*CASES, *OTHERS])


def test_a_replacement_is_sent_two_tests_or_told_that_there_are_no_more() -> None:
    """A worker with one test waits for the next before it begins, and nobody else is there."""
    alone = [f"t.py::test_{k}" for k in range(5)]
    controller = Controller(alone, alone, workers=1)
    collected(controller)
    (first,) = controller.workers
    until(controller, first, started=1)
    lose(controller, first)
    controller.run()
    assert controller.crashed == alone[:1]
    assert finished(controller) == alone[1:]


def test_a_replacement_that_collects_other_tests_ends_the_run() -> None:
    controller = Controller(CASES, CASES)
    collected(controller)
    controller.collection = [*CASES[1:], "t.py::test_new"]
    lose(controller, controller.workers[0])
    with pytest.raises(
        pytest.exit.Exception,
        match=r"gw2 .* 1 are missing \['t.py::test_a\[0\]'\], 1 are new \['t.py::test_new'\]",
    ):
        controller.run()


def test_a_worker_that_is_gone_before_the_controller_hears_of_it() -> None:
    """What could not be sent waits for a worker that is there."""
    controller = Controller([*CASES, *OTHERS], [*CASES, *OTHERS])
    first, second = controller.workers
    for worker in (first, second):
        worker.move()
        worker.move()
    first.die(deaf=True)
    controller.hear_all()
    first.mourn()
    controller.hear_all()
    controller.run()
    assert controller.crashed == []
    assert finished(controller) == sorted([*CASES, *OTHERS])


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Controller, random.Random, int]:
    """A session of some functions and plain tests, a source of luck, and how many workers die."""
    functions = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    cases = [f"t.py::test_{f}[{k}]" for f, count in enumerate(functions) for k in range(count)]
    plain = [f"t.py::test_plain_{k}" for k in range(draw(st.integers(0, 4)))]
    controller = Controller(
        cases,
        [*cases, *plain],
        workers=draw(st.integers(1, 4)),
        max_restarts=draw(st.sampled_from([None, None, None, 0, 1])),
    )
    return controller, random.Random(draw(st.integers(0, 2**32))), draw(st.integers(0, 4))


@settings(max_examples=600)
@given(sessions())
def test_whatever_dies_when_each_test_is_run_or_reported_once(
    session: tuple[Controller, random.Random, int],
) -> None:
    """Messages, deaths and the news of them in any order that processes can bring about.

    A test that had begun is never begun again; what a lost worker had not come to is run by
    another, one test at most being reported in its place.
    """
    controller, luck, deaths = session
    played: list[str] = []
    reluctance = luck.choice([3, 10, 30])
    while not controller.over:
        moves = [
            *[("hear", controller, controller.hear)] * (2 * controller.can_hear),
            *(("move", worker, worker.move) for worker in controller.workers if worker.can_move),
            *(
                ("mourn", worker, worker.mourn)
                for worker in controller.workers
                if not worker.alive and not worker.mourned
            ),
        ]
        assert moves, f"nobody has anything to do, and the session is not over: {played}"
        alive = [worker for worker in controller.workers if worker.alive and not worker.mourned]
        if alive and deaths and luck.randrange(reluctance) == 0:
            worker = luck.choice(alive)
            worker.die(deaf=luck.random() < 0.5)
            deaths -= 1
            played.append(f"die {worker}")
            continue
        what, who, act = luck.choice(moves)
        played.append(f"{what} {who}")
        act()
    begun, done, dead = started(controller), finished(controller), controller.dead
    assert len(set(begun)) == len(begun), played
    assert len(set(controller.crashed)) == len(controller.crashed) <= len(dead), played
    assert set(begun) - set(done) <= set(controller.crashed), played
    if not controller.gave_up:
        assert sorted([*done, *controller.crashed]) == sorted(controller.collection), played
    for function in {function_of(test) for test in controller.equivalence_tests}:
        at = [w for w in controller.workers if any(function_of(t) == function for t in w.started)]
        assert sum(worker.alive for worker in at) <= 1, played


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
