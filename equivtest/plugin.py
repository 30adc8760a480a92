"""pytest hooks, and nothing else: what a case is lives in ``check``, what it leaves in ``report``.

Every session loads this module: torch, pandas and the pool are imported where a case needs them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import pytest

from equivtest import options
from equivtest.devices import WORKER, first_free
from equivtest.report.run import RunFolder

if TYPE_CHECKING:
    from equivtest.fixture import Cases

_FIXTURE = "equivalence"


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_session] = Session(config, options.settings(config))
    config.pluginmanager.register(config.stash[_session], "equivtest-session")


@pytest.fixture
def equivalence(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Check one experiment under one plan, and fail the test where the verdict is not as expected.

    ``equivalence(experiment, plan, *, precision="fp32", loop=None, wrap=None,
    expect="equivalent")`` returns the ``Verdict``. The record is written before the test fails. A
    case that cannot run here, and was not expected not to, is a skip with the reason.
    """
    from equivtest.fixture import Equivalence

    return Equivalence(request.config.stash[_session].cases(), request)


class Session:
    """One process of a pytest session: an xdist worker, the controller, or all there is."""

    def __init__(self, config: pytest.Config, chosen: options.Settings) -> None:
        self._settings = chosen
        self._folder = RunFolder(chosen.reports, chosen.run_id, chosen.started)
        self._is_worker = hasattr(config, "workerinput")
        self._outcomes: dict[str, str] = {}
        self._summary: list[str] = []
        self._cases: Cases | None = None
        self._places: dict[str, int] = {}  # of the workers that live, by id
        if WORKER in getattr(config, "workerinput", {}):
            os.environ[WORKER] = config.workerinput[WORKER]  # type: ignore[attr-defined]

    def cases(self) -> Cases:
        """What this process checks cases with."""
        if self._cases is None:
            from equivtest.fixture import Cases

            self._cases = Cases(self._settings, self._folder)
        return self._cases

    # First, because xdist's own hook tells the controller, whose scheduler reads the list.
    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.config.option.collectonly:
            return
        tests = [i.nodeid for i in session.items if _FIXTURE in getattr(i, "fixturenames", ())]
        if tests:
            from equivtest.pool import current_pool

            self._write_collected(tests)
            current_pool().start()

    def _write_collected(self, tests: list[str]) -> None:
        """A folder that refuses ends the session here; a worker's cases say so one by one."""
        try:
            self._folder.write_collected(tests)
        except OSError as error:
            if not self._is_worker:
                raise pytest.UsageError(
                    f"--equiv-reports={self._settings.reports} cannot be written to: {error}; pass "
                    "a folder that can"
                ) from None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """In the controller too, where the test that killed its worker shows as failed."""
        if report.when == "call" or report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome

    # After the fixtures' teardown, and after xdist has waited for its workers.
    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        try:
            return (yield)
        finally:
            _close_pool()
            if not self._is_worker and self._folder.path.is_dir():
                from equivtest.report.closing import close_run

                closing = close_run(self._folder, self._outcomes)
                self._summary = closing.lines
                if closing.not_compared and self._settings.device == "cuda":
                    # Skipped tests alone would pass, on a machine that was to have a GPU.
                    self._summary = [closing.not_compared, *closing.lines]
                    if session.exitstatus == pytest.ExitCode.OK:
                        session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._summary:
            terminalreporter.section("equivtest")
            for line in self._summary:
                terminalreporter.write_line(line)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        taken = list(self._places.values())
        self._places[node.workerinput["workerid"]] = first_free(taken)
        place = f"{first_free(taken)}/{node.workerinput['workercount']}"
        node.workerinput.update(options.for_worker(self._settings) | {WORKER: place})

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._places.pop(node.workerinput["workerid"], None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Only where nobody chose another way: ``load`` is what ``-n`` alone means."""
        if config.getvalue("dist") != "load":
            return None
        from equivtest.scheduling import ExperimentScheduling

        return ExperimentScheduling(config, log, self._folder.read_collected)


_session = pytest.StashKey[Session]()


def _close_pool() -> None:
    if "equivtest.pool" in sys.modules:
        from equivtest.pool import current_pool

        current_pool().close()
