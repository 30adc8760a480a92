"""Jinja as the pages use it."""

from __future__ import annotations

import jinja2

from equivtest.compare import figures
from equivtest.compare.prose import margin_text
from equivtest.report.assets import TEMPLATES
from equivtest.report.ranking import MEANINGS, SYMBOLS, fails
from equivtest.report.summary import case_name
from equivtest.report.views import anchor, anchor_of


def templates() -> jinja2.Environment:
    """The environment of every page: autoescaping, and loud about a name that is not there."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        duration=figures.duration, margin=figures.margin, several=figures.several
    )
    environment.tests["failing"] = fails
    environment.globals.update(
        symbols=SYMBOLS,
        meanings=MEANINGS,
        anchor=anchor,
        anchor_of=anchor_of,
        case_name=case_name,
        margin_text=margin_text,
    )
    return environment
