"""``divergence.html``: one file, rendered from the records alone, that asks for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from equivtest.report import assets
from equivtest.report.atomic import write_text, write_whole
from equivtest.report.casehtml import cases_html, markup
from equivtest.report.detail import Shown, told
from equivtest.report.environment import run_environment
from equivtest.report.faulttable import fault_table
from equivtest.report.grouping import Failing, failing_groups
from equivtest.report.index import index
from equivtest.report.matrix import matrices
from equivtest.report.ranking import fails, fixed_key, worst, worst_first
from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.summary import counts, missing_text, notices, title
from equivtest.report.templating import templates
from equivtest.report.views import sensitivity_lines, worst_view

_FINDINGS = 40
"""Rows of the first table; the index has all."""

# Of more failures the worst cases of the first findings: forty open cases hide the second fault
# below the first.
_OPEN = 3


def write_page(run: Run, path: Path, *, external: bool = False) -> int:
    """Write the page, whole or not at all; returns its size in bytes.

    Args:
        external: style and script go into files beside the page, for servers whose content
            security policy forbids what is inline.
    """
    if external:
        for name, content in assets.files().items():
            write_whole(path.with_name(name), content)
    return write_text(path, render_page(run, external=external))


def render_page(run: Run, *, external: bool = False) -> str:
    """The page as a string of HTML."""
    environment = templates()
    shown_first = worst(run.records)
    groups = failing_groups(run.records)
    return environment.get_template("page.html").render(
        assets=assets.beside() if external else assets.inside(),
        title=title(run),
        run=run,
        run_ids=list(dict.fromkeys(run.run_ids)),
        missing=missing_text(run),
        counts=counts(run.records),
        worst=worst_view(shown_first) if shown_first else None,
        failing=groups[:_FINDINGS],
        more_failing=max(len(groups) - _FINDINGS, 0),
        run_environment=run_environment(run.records),
        notes=[text.removeprefix("note: ") for text in notices(run) if text.startswith("note: ")],
        duration_s=sum(record.verdict.duration_s for record in run.records),
        matrices=matrices(run.records),
        index=index(run.records),
        faults=fault_table(run.records),
        certificates=[
            (record, list(sensitivity_lines(record.verdict)))
            for record in sorted(run.records, key=fixed_key)
            if record.verdict.sensitivity
        ],
        **_cases(run, environment, groups),
    )


def _cases(run: Run, environment: jinja2.Environment, groups: Sequence[Failing]) -> dict[str, Any]:
    """All cases as HTML, in the three groups of the page."""
    failing = [record for record in worst_first(run.records) if fails(record)]
    leading = [group.worst.id for group in groups]
    opened = {r.id for r in failing} if len(failing) <= _OPEN else set(leading[:_OPEN])
    made = cases_html(environment, run.records, opened=opened, history=run.history)
    not_run = [r for r in run.records if not r.verdict.passed and not fails(r)]
    return {
        "left_out": told(list(made.values())),
        "failing_cases": markup(failing, made),
        "not_run_cases": markup(sorted(not_run, key=fixed_key), made),
        "passed_groups": _passed(run.records, made),
    }


def _passed(
    records: Sequence[Record], made: Mapping[str, Shown]
) -> list[tuple[str, str, list[Markup]]]:
    ordered = sorted((r for r in records if r.verdict.passed), key=fixed_key)
    return [
        (experiment, loop, markup(list(group), made))
        for (experiment, loop), group in groupby(ordered, key=lambda r: (r.experiment, r.loop))
    ]
