"""The plugin's options, their ini twins, and the checks that end a session with a clear message."""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

_OPTIONS = {
    "reports": ("DIR", "folder for records, results.csv and divergence.html (default: reports)"),
    "timeout": ("SECONDS", "time that one case may take before it is an error"),
    "device": ("DEVICE", "where the cases run: cpu or cuda (default: cpu)"),
    "max-ranks": ("N", "processes that one case may have; larger plans are not run, and say so"),
    "isolate": (
        "WHEN",
        "isolate the sources of divergence: auto (where a case diverges), always or never",
    ),
    "run-id": (
        "NAME",
        "name of this run's folder (default: a new one); an old one is added to",
    ),
}


@dataclass(frozen=True)
class Settings:
    """What the session runs with, the same in every xdist worker.

    Attributes:
        reports: absolute path of the reports folder.
        run_id: name of this run's folder in it.
        started: when the session began, ISO 8601 in UTC.
        device: ``cpu`` or ``cuda``.
        timeout_s: seconds for one case, or None for check's default.
        max_ranks: processes of one case, or None for no bound.
        share_gpus: replicas share GPUs, on gloo, where there are more of them.
        isolate: ``auto``, ``always`` or ``never``.
        sensitivity: run the planted faults against every case.
    """

    reports: Path
    run_id: str
    started: str
    device: str
    timeout_s: float | None
    max_ranks: int | None
    share_gpus: bool = False
    isolate: str = "auto"
    sensitivity: bool = False


def add_options(parser: pytest.Parser) -> None:
    """``--equiv-*`` on the command line and ``equiv_*`` in the ini file."""
    group = parser.getgroup("equivtest", "numerical equivalence of training loops")
    for name, (metavar, text) in _OPTIONS.items():
        group.addoption(f"--equiv-{name}", metavar=metavar, default=None, help=text)
        parser.addini(f"equiv_{name.replace('-', '_')}", help=text, default="")
    text = "let replicas share GPUs, on gloo, where there are more replicas than GPUs"
    group.addoption("--equiv-share-gpus", action="store_true", help=text)
    parser.addini("equiv_share_gpus", help=text, type="bool", default=False)
    text = "run the planted faults against every case as well, and say which would be caught there"
    group.addoption("--equiv-sensitivity", action="store_true", help=text)
    parser.addini("equiv_sensitivity", help=text, type="bool", default=False)


def settings(config: pytest.Config) -> Settings:
    """Options, checked.

    Raises:
        pytest.UsageError: a value that cannot be; names it, what was given and what to pass.
    """
    given: dict[str, Any] = getattr(config, "workerinput", {})
    started = given.get("equiv_started") or datetime.now(UTC).isoformat(timespec="seconds")
    run_id = given.get("equiv_run_id") or _read(config, "run-id", _run_id) or _new_run_id(started)
    reports = given.get("equiv_reports") or _reports(config)
    return Settings(
        reports=Path(reports),
        run_id=run_id,
        started=started,
        device=_read(config, "device", _device) or "cpu",
        timeout_s=_read(config, "timeout", _timeout),
        max_ranks=_read(config, "max-ranks", _max_ranks),
        isolate=_read(config, "isolate", _isolate) or "auto",
        share_gpus=config.getoption("--equiv-share-gpus") or config.getini("equiv_share_gpus"),
        sensitivity=config.getoption("--equiv-sensitivity") or config.getini("equiv_sensitivity"),
    )


def for_worker(chosen: Settings) -> dict[str, str]:
    """What an xdist worker must not choose by itself; exact builtins, as execnet wants them."""
    return {
        "equiv_started": chosen.started,
        "equiv_run_id": chosen.run_id,
        "equiv_reports": str(chosen.reports),
    }


def _read(config: pytest.Config, name: str, parse: Callable[[str, str], T]) -> T | None:
    option = config.getoption(f"--equiv-{name}")
    if option is not None:
        return parse(f"--equiv-{name}", str(option))
    ini = f"equiv_{name.replace('-', '_')}"
    value = config.getini(ini)
    return parse(ini, str(value)) if value != "" else None


def _reports(config: pytest.Config) -> str:
    """From the command line relative to where pytest was called, else to its root folder."""
    on_command_line = config.getoption("--equiv-reports") is not None
    base = config.invocation_params.dir if on_command_line else config.rootpath
    folder = (base / (_read(config, "reports", _folder) or "reports")).absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise pytest.UsageError(
            f"--equiv-reports={folder}: {existing} is not a folder that can be written to; "
            "pass a folder, which is made if it is not there"
        )
    return str(folder)


def _folder(option: str, value: str) -> str:
    if not value.strip():
        raise pytest.UsageError(f"{option}={value!r}: pass a folder, such as reports")
    return value


def _timeout(option: str, value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise pytest.UsageError(f"{option}={value!r}: pass a number of seconds above 0, such as 60")
    return seconds


def _device(option: str, value: str) -> str:
    if value not in ("cpu", "cuda"):
        raise pytest.UsageError(f"{option}={value!r}: pass cpu or cuda")
    return value


def _isolate(option: str, value: str) -> str:
    if value not in ("auto", "always", "never"):
        raise pytest.UsageError(f"{option}={value!r}: pass auto, always or never")
    return value


def _max_ranks(option: str, value: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise pytest.UsageError(f"{option}={value!r}: pass a whole number of at least 1, such as 4")
    return int(value)


def _run_id(option: str, value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", value):
        raise pytest.UsageError(
            f"{option}={value!r}: pass up to 100 letters, digits, dots, dashes and underscores, "
            "starting with a letter or digit, such as nightly-42"
        )
    return value


def _new_run_id(started: str) -> str:
    return f"{re.sub('[^0-9]', '', started)[:14]}-{secrets.token_hex(3)}"
