"""A case as HTML, in as much detail as there is room for."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jinja2
from markupsafe import Markup

from equivtest.report.detail import Detail, Shown, shown
from equivtest.report.history import Point
from equivtest.report.record import Record
from equivtest.report.summary import case_name
from equivtest.report.views import anchor, case_view


def cases_html(
    environment: jinja2.Environment,
    records: Sequence[Record],
    *,
    opened: Collection[str] = (),
    history: Mapping[str, Sequence[Point]] | None = None,
) -> dict[str, Shown]:
    """By id each case as HTML.

    Args:
        opened: ids of those that are open from the start.
        history: by id, the margins of a case by run.
    """
    macros: Any = environment.get_template("case.html").module
    points = history or {}

    def html(record: Record, detail: Detail) -> str:
        if detail is Detail.LINE:
            return str(macros.line(record, anchor(record), case_name(record)))
        try:
            view = case_view(record, detail, points.get(record.id, ()))
            return str(macros.case(view, record.id in opened))
        except Exception as error:  # one that cannot be drawn takes no other with it
            told = "".join(traceback.format_exception_only(error)).strip()
            return str(macros.line(record, anchor(record), case_name(record), told))

    return shown(records, html)


def markup(records: Sequence[Record], made: Mapping[str, Shown]) -> list[Markup]:
    """What the templates escaped already, in the order of ``records``."""
    return [Markup(made[record.id].html) for record in records]
