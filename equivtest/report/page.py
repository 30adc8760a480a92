"""``divergence.html``: one file, rendered from the records alone, that asks for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from equivtest.compare.prose import headline, what_to_change
from equivtest.report import assets
from equivtest.report.atomic import write_whole
from equivtest.report.detail import Detail, Shown, shown, told
from equivtest.report.environment import run_environment
from equivtest.report.faulttable import fault_table
from equivtest.report.grouping import evidence, failing_groups, sentence_case
from equivtest.report.index import index
from equivtest.report.matrix import matrices
from equivtest.report.panels.source import pointed
from equivtest.report.panels.weights import Mosaic, mosaics
from equivtest.report.ranking import fails, fixed_key, worst, worst_first
from equivtest.report.record import Record
from equivtest.report.run import Run
from equivtest.report.summary import case_name, counts, missing_text, title
from equivtest.report.templating import templates
from equivtest.report.views import anchor, case_view

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
    # A lone surrogate in a name has no UTF-8: it is shown as its escape.
    content = render_page(run, external=external).encode("utf-8", "backslashreplace")
    write_whole(path, content)
    return len(content)


def render_page(run: Run, *, external: bool = False) -> str:
    """The page as a string of HTML."""
    environment = templates()
    return environment.get_template("page.html").render(
        assets=assets.beside() if external else assets.inside(),
        title=title(run),
        run=run,
        run_ids=list(dict.fromkeys(run.run_ids)),
        missing=missing_text(run),
        counts=counts(run.records),
        **_worst(run.records),
        failing=failing_groups(run.records),
        run_environment=run_environment(run.records),
        duration_s=sum(record.verdict.duration_s for record in run.records),
        matrices=matrices(run.records),
        index=index(run.records),
        faults=fault_table(run.records),
        certificates=[r for r in sorted(run.records, key=fixed_key) if r.verdict.sensitivity],
        **_cases(run, environment),
    )


def _worst(records: Sequence[Record]) -> dict[str, Any]:
    """The case on the first screen."""
    record = worst(records)
    if record is None:
        return {"worst": None}
    return {
        "worst": record,
        "worst_name": case_name(record),
        "worst_headline": sentence_case(headline(record.verdict)),
        "worst_evidence": evidence(record),
        "worst_change": what_to_change(record.verdict.cause),
        "worst_mosaic": _telling(mosaics(record.verdict)) if fails(record) else None,
        "worst_source": pointed(record.listings, record.verdict) if fails(record) else None,
    }


def _telling(found: Sequence[Mosaic]) -> Mosaic | None:
    """The first update with a weight that is off."""
    off = (m for m in found if any(cell.mark for row in m.rows for cell in row.cells))
    return next(off, None)


def _cases(run: Run, environment: jinja2.Environment) -> dict[str, Any]:
    """All cases as HTML, in the three groups of the page."""
    macros: Any = environment.get_template("case.html").module
    groups = failing_groups(run.records)
    failing = [record for record in worst_first(run.records) if fails(record)]
    leading = [group.worst.id for group in groups]
    opened = {r.id for r in failing} if len(failing) <= _OPEN else set(leading[:_OPEN])

    def html(record: Record, detail: Detail) -> str:
        if detail is Detail.LINE:
            return str(macros.line(record, anchor(record), case_name(record)))
        history = run.history.get(record.id, ())
        return str(macros.case(case_view(record, detail, history), record.id in opened))

    made = shown(run.records, html)
    return {
        "left_out": told(list(made.values())),
        "failing_cases": _markup(failing, made),
        "not_run_cases": _markup(_not_run(run.records), made),
        "passed_groups": _passed(run.records, made),
    }


def _not_run(records: Sequence[Record]) -> list[Record]:
    return sorted((r for r in records if not r.verdict.passed and not fails(r)), key=fixed_key)


def _passed(
    records: Sequence[Record], made: Mapping[str, Shown]
) -> list[tuple[str, str, list[Markup]]]:
    ordered = sorted((r for r in records if r.verdict.passed), key=fixed_key)
    return [
        (experiment, loop, _markup(list(group), made))
        for (experiment, loop), group in groupby(ordered, key=lambda r: (r.experiment, r.loop))
    ]


def _markup(records: Sequence[Record], made: Mapping[str, Shown]) -> list[Markup]:
    """What the templates escaped already."""
    return [Markup(made[record.id].html) for record in records]
