"""``comparison.html``: what differs between two runs, with the cases that changed."""

from __future__ import annotations

from pathlib import Path

from equivtest.report import assets
from equivtest.report.atomic import write_text
from equivtest.report.casehtml import cases_html, markup
from equivtest.report.compared import difference_text, title
from equivtest.report.comparing import FAULTY_NOISE, LEAST_NOISE, Comparison
from equivtest.report.detail import told
from equivtest.report.templating import templates


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_text(path, render_comparison(comparison))


def render_comparison(comparison: Comparison) -> str:
    """The page as a string of HTML."""
    environment = templates()
    records = [changed.new for changed in comparison.changed]
    cases = cases_html(environment, records)
    return environment.get_template("comparison.html").render(
        assets=assets.inside(),
        title=title(comparison),
        comparison=comparison,
        differences=[difference_text(one) for one in comparison.environment],
        least_noise=LEAST_NOISE,
        faulty_noise=FAULTY_NOISE,
        left_out=told(list(cases.values())),
        cases=markup(records, cases),
    )
