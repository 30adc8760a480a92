"""xdist's own controller over workers that are played: every message in an order of choice.

No process runs. A worker says and does what ``xdist.remote`` does, one move at a time, and dies
where it is told to; the controller is ``DSession`` itself with the scheduler under test.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from xdist.dsession import DSession

from equivtest.scheduling import ExperimentScheduling

_SHUTDOWN = -1


class Worker:
    """What the controller sends to, and what the process behind it does."""

    def __init__(self, name: str, say: Any, collection: Sequence[str]) -> None:
        self.gateway = SimpleNamespace(id=name, spec=SimpleNamespace(id=name))
        self.workeroutput = {"exitstatus": 0, "shouldfail": False, "shouldstop": False}
        self.started: list[str] = []
        self.finished: list[str] = []
        self.alive = True
        self.mourned = False
        """The controller has been told of the death."""
        self._say = say
        self._collection = list(collection)
        self._inbox: deque[int] = deque()
        self._deaf = False
        self._shutdown_sent = False
        self._waits = False
        self._ended = False
        self._life = self._live()

    def __repr__(self) -> str:
        return str(self.gateway.id)

    # The controller's side, as xdist.workermanage.WorkerController has it.

    @property
    def shutting_down(self) -> bool:
        return self.mourned or self._shutdown_sent

    def send_runtest_some(self, indices: Sequence[int]) -> None:
        self._send(indices)

    def shutdown(self) -> None:
        if not self.mourned:
            self._shutdown_sent = True
            if not self._deaf:
                self._send([_SHUTDOWN])

    def _send(self, items: Sequence[int]) -> None:
        if self._deaf:
            raise OSError("cannot send (already closed?)")
        if self.alive:
            self._inbox.extend(items)

    # The process's side, as xdist.remote has it.

    @property
    def can_move(self) -> bool:
        return self.alive and not self._ended and (bool(self._inbox) or not self._waits)

    def move(self) -> None:
        """Do and say whatever comes next."""
        self._ended = next(self._life, True)

    def die(self, *, deaf: bool) -> None:
        """The process is gone; what is sent until the controller hears of it fails or is lost."""
        self.alive, self._deaf = False, deaf

    def mourn(self) -> None:
        """The controller's end of the pipe sees the end of it."""
        self._say("errordown", node=self, error="Not properly terminated")
        self.mourned = True

    def _live(self) -> Iterator[bool]:
        self._say("workerready", node=self, workerinfo={})
        yield False
        self._say("collectionfinish", node=self, ids=list(self._collection))
        yield False
        item = yield from self._received()
        while item != _SHUTDOWN:
            following = yield from self._received()  # a worker needs it before it runs an item
            self.started.append(self._collection[item])
            yield False
            self.finished.append(self._collection[item])
            self._say("runtest_protocol_complete", node=self, item_index=item, duration=0.0)
            yield False
            item = following
        self.mourned = True
        self._say("workerfinished", node=self)

    def _received(self) -> Iterator[Any]:
        while not self._inbox:
            self._waits = True
            yield False
        self._waits = False
        return self._inbox.popleft()


class Controller:
    """``DSession`` of ``-n`` workers, and what it reported as crashed."""

    def __init__(
        self,
        equivalence_tests: Sequence[str],
        collection: Sequence[str],
        workers: int = 2,
        max_restarts: int | None = None,
    ) -> None:
        self.crashed: list[str] = []
        self.workers: list[Worker] = []
        self.collection = collection
        self.equivalence_tests = equivalence_tests
        self._names = itertools.count()
        config = self._config(workers, max_restarts)
        self._session = DSession(config)
        self.scheduler = ExperimentScheduling(config, self._session.log, lambda: equivalence_tests)
        self._session.sched = self.scheduler
        self._session.shouldstop = False
        self._session._session = SimpleNamespace(testscollected=0)
        self._session.nodemanager = SimpleNamespace(
            group=SimpleNamespace(allocate_id=lambda spec: None),
            setup_node=lambda spec, putevent: self._new_worker(),
        )
        self._session._active_nodes.update([self._new_worker() for _ in range(workers)])

    def __repr__(self) -> str:
        return "the controller"

    @property
    def over(self) -> bool:
        return self._session.session_finished

    @property
    def dead(self) -> list[Worker]:
        return [worker for worker in self.workers if not worker.alive]

    @property
    def gave_up(self) -> bool:
        """More workers died than may be replaced."""
        return self._session._summary_report is not None

    @property
    def can_hear(self) -> bool:
        return not self.over and not self._session.queue.empty()

    def hear(self) -> None:
        """Process the oldest message that has not been."""
        self._session.loop_once()

    def run(self) -> None:
        """Until the session is over, every worker moving in turn, no message waiting."""
        while not self.over:
            ready = [worker for worker in self.workers if worker.can_move]
            assert ready or self.can_hear, "nobody has anything to do, and the session is not over"
            for worker in ready:
                worker.move()
            self.hear_all()

    def hear_all(self) -> None:
        while self.can_hear:
            self.hear()

    def _new_worker(self) -> Worker:
        def say(event: str, **arguments: Any) -> None:
            self._session.queue.put((event, arguments))

        self.workers.append(Worker(f"gw{next(self._names)}", say, self.collection))
        return self.workers[-1]

    def _config(self, workers: int, max_restarts: int | None) -> Any:
        values = {"tx": ["popen"] * workers, "maxfail": 0}
        options = {
            "debug": False,
            "loadscopereorder": True,
            "maxschedchunk": None,
            "maxworkerrestart": None if max_restarts is None else str(max_restarts),
            "numprocesses": workers,
            "verbose": -1,
        }
        return SimpleNamespace(
            option=SimpleNamespace(**options),
            getvalue=values.get,
            getoption=options.get,
            pluginmanager=SimpleNamespace(getplugin=lambda name: None),
            hook=_Hooks(self.crashed),
        )


class _Hooks:
    """Hooks that nobody implements, but for the report of a crash."""

    def __init__(self, crashed: list[str]) -> None:
        self._crashed = crashed

    def __getattr__(self, name: str) -> Any:
        return lambda **arguments: None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._crashed.append(report.nodeid)
