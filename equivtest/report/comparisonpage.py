"""``comparison.html``: what differs between two runs, with the cases that changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from equivtest.compare import figures
from equivtest.report import assets
from equivtest.report.atomic import write_whole
from equivtest.report.comparing import Comparison, difference_text, title
from equivtest.report.detail import shown, told
from equivtest.report.record import Record
from equivtest.report.templating import templates
from equivtest.report.views import case_view


@dataclass(frozen=True)
class Pair:
    """A case of both runs as the page shows it."""

    change: str
    old: Record
    new: Record
    before: str
    after: str
    noise: str


def write_comparison(comparison: Comparison, path: Path) -> None:
    """Write the page, whole or not at all."""
    write_whole(path, render_comparison(comparison).encode("utf-8", "backslashreplace"))


def render_comparison(comparison: Comparison) -> str:
    """The page as a string of HTML."""
    environment = templates()
    macros = environment.get_template("case.html").module
    changed = [_pair(str(c.change), c.old, c.new) for c in comparison.changed]
    moved = [_pair("rose" if m.rose else "fell", m.old, m.new, m.noise) for m in comparison.moved]
    cases = shown(
        [pair.new for pair in changed],
        lambda record, detail: str(
            macros.case(case_view(record, detail), False)  # type: ignore[attr-defined]
        ),
    )
    return environment.get_template("comparison.html").render(
        assets=assets.inside(),
        title=title(comparison),
        comparison=comparison,
        changed=changed,
        moved=moved,
        differences=[difference_text(one) for one in comparison.environment],
        left_out=told(list(cases.values())),
        cases=[Markup(cases[pair.new.id].html) for pair in changed],
    )


def _pair(change: str, old: Record, new: Record, noise: float | None = None) -> Pair:
    return Pair(
        change=change,
        old=old,
        new=new,
        before=_margin(old),
        after=_margin(new),
        noise="" if noise is None else figures.margin(noise),
    )


def _margin(record: Record) -> str:
    return figures.margin(record.verdict.margin) if record.verdict.rows else figures.ABSENT
