"""The end of a session: results table, page, and what the terminal says."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from equivtest.compare import figures
from equivtest.compare.verdict import Status
from equivtest.devices import NO_DEVICE
from equivtest.report.page import write_page
from equivtest.report.results import results, write_csv, write_parquet
from equivtest.report.run import Run, RunFolder, load
from equivtest.report.summary import step_summary, terminal_lines

PAGE = "divergence.html"
SELECTION = "selection.html"
TABLE = "results.csv"
PARQUET = "results.parquet"

_LARGE_BYTES = 5 * 1024 * 1024


@dataclass(frozen=True)
class Closing:
    """What a session says at its end.

    Attributes:
        lines: for the terminal.
        not_compared: why no case was compared with anything; empty where one was.
    """

    lines: list[str]
    not_compared: str = ""


def close_run(folder: RunFolder, outcomes: Mapping[str, str]) -> Closing:
    """Render the run from its records.

    A disk that is full or read-only takes the page, and neither the tests' results nor the records.
    """
    try:
        run = load([folder.path])
        missing = {nodeid: outcomes.get(nodeid, how) for nodeid, how in run.missing.items()}
        folder.write_ended(missing)
        run = replace(run, missing=missing, ended=True)
        lines = render(run, folder.reports)
        append_step_summary(run)
    except OSError as error:
        return Closing([f"the report could not be written: {error}"])
    except Exception as error:  # the tests' own results must not go with it
        told = "".join(traceback.format_exception_only(error)).strip()
        again = f"try `equivtest report {folder.path}`"
        return Closing([f"the report could not be made: {told}; the records are there: {again}"])
    return Closing(lines, not_compared(run))


def not_compared(run: Run) -> str:
    """Why no case of the run was compared, or nothing."""
    verdicts = [record.verdict for record in run.records]
    if not verdicts or any(verdict.status is not Status.NOT_RUN for verdict in verdicts):
        return ""
    if all(verdict.failure and verdict.failure.text == NO_DEVICE for verdict in verdicts):
        return NO_DEVICE
    return f"nothing was compared: all {len(verdicts)} cases could not be run here"


def render(run: Run, out: Path, *, external: bool = False) -> list[str]:
    """Write tables and page to ``out``; returns lines for the terminal.

    A selection is a page of its own, so that those of the whole run stay.

    Args:
        external: the page's style and script go into files beside it.
    """
    page = out / (SELECTION if run.selection else PAGE)
    size = write_page(run, page, external=external)
    if not run.selection:
        table = results(run.records)
        write_csv(table, out / TABLE)
        write_parquet(table, out / PARQUET)
    lines = terminal_lines(run, page)
    if size > _LARGE_BYTES:
        lines.append(
            f"warning: the page is {size / 1024 / 1024:.1f} MB; browsers get slow above 5 MB: "
            "`equivtest report --select WORDS` shows some cases"
        )
    return [figures.printable(line) for line in lines]


def append_step_summary(run: Run, environ: Mapping[str, str] = os.environ) -> None:
    """Add to the file that GitHub Actions shows on a run's page, where there is one."""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(figures.printable(step_summary(run)))
