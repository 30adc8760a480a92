"""``divergence.html``: one file, rendered from the records alone, that asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import jinja2

from equivtest.compare import figures
from equivtest.compare.prose import headline, what_to_change
from equivtest.report.atomic import write_whole
from equivtest.report.environment import run_environment
from equivtest.report.grouping import evidence, failing_groups, sentence_case
from equivtest.report.matrix import matrices
from equivtest.report.ranking import MEANINGS, SYMBOLS, fails, fixed_key, worst, worst_first
from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.summary import case_name, counts, missing_text, title
from equivtest.report.views import CaseView, anchor, case_view

# With more failures than this only the worst of each finding is open: forty open cases hide the
# second fault below the first.
_ALL_OPEN = 12


def write_page(run: Run, path: Path) -> int:
    """Write the page, whole or not at all; returns its size in bytes."""
    # A lone surrogate in a name has no UTF-8: it is shown as its escape.
    content = render_page(run).encode("utf-8", "backslashreplace")
    write_whole(path, content)
    return len(content)


def render_page(run: Run) -> str:
    """The page as a string of HTML."""
    failing = [record for record in worst_first(run.records) if fails(record)]
    not_run = [r for r in run.records if not r.verdict.passed and not fails(r)]
    passed = [r for r in run.records if r.verdict.passed]
    groups = failing_groups(run.records)
    shown = worst(run.records)
    opened = {group.worst.id for group in groups} if len(failing) > _ALL_OPEN else None
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=title(run),
            run=run,
            counts=counts(run.records),
            worst=shown,
            worst_name=case_name(shown) if shown else "",
            worst_headline=sentence_case(headline(shown.verdict)) if shown else "",
            worst_evidence=evidence(shown) if shown else "",
            worst_change=what_to_change(shown.verdict.cause) if shown else "",
            failing=groups,
            missing=missing_text(run),
            run_environment=run_environment(run.records),
            duration_s=sum(record.verdict.duration_s for record in run.records),
            matrices=matrices(run.records),
            failing_cases=[
                case_view(record, opened is None or record.id in opened) for record in failing
            ],
            not_run_cases=[case_view(r) for r in sorted(not_run, key=fixed_key)],
            passed_groups=_passed(passed),
        )
    )


def _passed(records: Sequence[Record]) -> list[tuple[str, str, list[CaseView]]]:
    ordered = sorted(records, key=fixed_key)
    return [
        (experiment, loop, [case_view(record) for record in group])
        for (experiment, loop), group in groupby(ordered, key=lambda r: (r.experiment, r.loop))
    ]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=figures.duration, margin=figures.margin, several=figures.several
    )
    environment.globals.update(
        symbols=SYMBOLS, meanings=MEANINGS, anchor=anchor, statuses=tuple(SYMBOLS)
    )
    return environment
