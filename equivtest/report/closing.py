"""The end of a session: results table, page, and what the terminal says."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from equivtest.report.page import write_page
from equivtest.report.results import write_results
from equivtest.report.run import Run, RunFolder, load
from equivtest.report.summary import step_summary, terminal_lines

PAGE = "divergence.html"
TABLE = "results.csv"

_LARGE_BYTES = 5 * 1024 * 1024


def close_run(folder: RunFolder, outcomes: Mapping[str, str]) -> list[str]:
    """Render the run from its records; returns lines for the terminal.

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
        return [f"the report could not be written: {error}"]
    return lines


def render(run: Run, out: Path) -> list[str]:
    """Write table and page to ``out``; returns lines for the terminal."""
    page = out / PAGE
    write_results(run.records, out / TABLE)
    size = write_page(run, page)
    lines = terminal_lines(run, page)
    if size > _LARGE_BYTES:
        lines.append(
            f"warning: the page is {size / 1024 / 1024:.1f} MB; browsers get slow above 5 MB: "
            "render fewer runs at a time"
        )
    return lines


def append_step_summary(run: Run, environ: Mapping[str, str] = os.environ) -> None:
    """Add to the file that GitHub Actions shows on a run's page, where there is one."""
    target = environ.get("GITHUB_STEP_SUMMARY")
    if target:
        with Path(target).open("a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(step_summary(run))
