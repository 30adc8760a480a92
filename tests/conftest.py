"""Hypothesis profiles, the soak only where it is named, and the table of drawn cases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Before anything imports torch: pytest's workers would otherwise have a thread a core each, and
# spend more time waiting for one another's cores than computing. Ranks have one thread anyway.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from drawn_table import PROPERTY, Tally
from hypothesis import HealthCheck, Phase, settings

# A case names itself in full: shrinking it would cost many real runs and tell no more.
_COMMON: dict[str, Any] = {
    "deadline": None,
    "print_blob": True,
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
    "suppress_health_check": (HealthCheck.too_slow, HealthCheck.data_too_large),
}
settings.register_profile("ci", derandomize=True, database=None, **_COMMON)
settings.register_profile("full", **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

_SOAK = Path(__file__).parent / "soak"
_tally = pytest.StashKey[Tally]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_tally] = tally = Tally()
    config.pluginmanager.register(_Table(tally), "drawn-table")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The soak takes long: it is collected only where it is named on the command line."""
    if collection_path != _SOAK:
        return None
    folder = config.invocation_params.dir
    named = [(folder / argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path.is_relative_to(_SOAK) for path in named) else True


class _Table:
    """Adds up what the tests' properties say, in the controller or where there is no other."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "call" else ():
            if name == PROPERTY:
                self._tally.merge(Tally.read(str(value)))

    # Before the terminal's own, which prints the summary.
    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._tally.excess() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._tally.rows:
            terminalreporter.section("drawn cases")
            for line in self._tally.lines():
                terminalreporter.write_line(line)
