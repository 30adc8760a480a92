"""A run in a few sentences: for the terminal, the step summary and the top of the page."""

from __future__ import annotations

import html
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from equivtest.compare import figures
from equivtest.compare.prose import headline
from equivtest.compare.sensitivity import sentence as sensitivity_sentence
from equivtest.compare.verdict import Status
from equivtest.report.grouping import Failing, failing_groups
from equivtest.report.identity import RECIPE
from equivtest.report.pointing import pointed
from equivtest.report.ranking import SYMBOLS, fails, fixed_key, worst
from equivtest.report.record import Record
from equivtest.report.run import UNFINISHED, Run

_FAILURES = 5
_NAMES = 3


def title(run: Run) -> str:
    """The run in one sentence; it never says more than the counts do."""
    total = len(run.records)
    failing = [record for record in run.records if fails(record)]
    not_run = sum(r.verdict.status is Status.NOT_RUN and not r.verdict.passed for r in run.records)
    if total == 0:
        return "No case left a record."
    if all(record.verdict.status is Status.NOT_RUN for record in run.records):
        return f"No case was run; {total:,} could not be run here."  # expected of some or not
    if not failing:
        done = total - not_run
        verb = "is" if done == 1 else "are"
        text = f"{figures.several(done, 'case')} {verb} as expected"
        return f"{text}; {not_run} could not be run here." if not_run else f"{text}."
    verb = "is" if len(failing) == 1 else "are"
    text = f"{len(failing):,} of {figures.several(total, 'case')} {verb} not as expected"
    causes = Counter(record.verdict.cause for record in failing if record.verdict.cause)
    if len(failing) > 1:
        text = "; ".join(filter(None, (text, _what(failing, causes))))
    return f"{text}."


def _what(failing: Sequence[Record], causes: Counter[str]) -> str:
    """The causes; and how many errors there are beside them, which have none."""
    errors = sum(record.verdict.status is Status.ERROR for record in failing)
    if not causes:
        return ""
    leading = _leading(causes, len(failing))
    return f"{leading}; {figures.several(errors, 'error')}" if errors else leading


def _leading(causes: Counter[str], failing: int) -> str:
    """The cause that most cases have; where none leads, how many causes there are."""
    (cause, count), *others = sorted(causes.items(), key=lambda item: (-item[1], item[0]))
    if count == failing and not others:
        return f"all of them: {cause}"
    if others and 3 * count < failing:
        return f"{len(causes)} different causes"
    return f"{count:,} of them: {cause}"


def counts(records: Sequence[Record]) -> list[tuple[Status, int, int]]:
    """For each status: how many cases, and how many of them fail their test."""
    return [
        (
            status,
            sum(record.verdict.status is status for record in records),
            sum(record.verdict.status is status and fails(record) for record in records),
        )
        for status in SYMBOLS
    ]


def counted(records: Sequence[Record]) -> str:
    """The statuses that occur, each with its symbol and number."""
    return "   ".join(
        f"{SYMBOLS[status]} {count:,} {status.value}"
        for status, count, _ in counts(records)
        if count
    )


def sentence(record: Record) -> str:
    """The case and what is the matter with it."""
    verdict = record.verdict
    expected = "" if verdict.passed else expectation_text(record)
    return f"{case_name(record)}: {headline(verdict)}{expected}"


def expectation_text(record: Record) -> str:
    """What the test wrote in ``expect``, where that is not the ordinary."""
    expect = record.verdict.expect
    return "" if expect == ("equivalent",) else f" Expected: {', '.join(expect)}."


def case_name(record: Record) -> str:
    """Experiment, loop, plan and precision, and which call of its test if not the first."""
    card = record.verdict.card
    call = record.id[len(record.nodeid) :] if record.id.startswith(record.nodeid) else ""
    loop = "" if record.loop == RECIPE else f" · {record.loop}"
    return f"{record.experiment}{loop} · {card.plan} · {card.precision}{f' {call}' if call else ''}"


def missing_text(run: Run) -> str:
    """How many collected cases have no record, and what became of them; empty if none."""
    if not run.missing:
        return ""
    how = Counter(run.missing.values())
    parts = [
        f"{count} {'never finished' if outcome == UNFINISHED else outcome}"
        for outcome, count in sorted(how.items())
    ]
    return (
        f"{figures.several(len(run.missing), 'collected test')} left no record ({', '.join(parts)})"
    )


def terminal_lines(run: Run, page: Path) -> list[str]:
    """The end of a session, on one screen."""
    lines = [title(run), counted(run.records)] if run.records else [title(run)]
    margins = [r for r in run.records if r.verdict.status is Status.EQUIVALENT and r.verdict.rows]
    if margins:
        nearest = max(sorted(margins, key=fixed_key), key=lambda record: record.verdict.margin)
        margin = figures.margin(nearest.verdict.margin)
        lines.append(f"largest margin that passed: {margin} of 1 ({case_name(nearest)})")
    lines += sensitivities(run.records)
    found = failing_groups(run.records)
    for group in found[:_FAILURES]:
        lines += _bullet(group)
    if len(found) > _FAILURES:
        lines.append(f"  and {figures.several(len(found) - _FAILURES, 'more finding')} on the page")
    if found:
        lines.append(f"rerun the worst: {found[0].worst.rerun}")
    lines += _noted(run.records) + notices(run)
    return [*lines, f"report: {page}"]


def _noted(records: Sequence[Record]) -> list[str]:
    """Costs and the like that notes name, where the test did not ask for them."""
    found = Counter(
        cause
        for record in records
        for cause in record.verdict.noted
        if cause not in record.verdict.expect
    )
    told = [f"{cause} in {figures.several(n, 'case')}" for cause, n in sorted(found.items())]
    return [f"noted: {', '.join(told)}"] if told else []


def sensitivities(records: Sequence[Record]) -> list[str]:
    """A line for each case of which it was asked."""
    asked = [record for record in records if record.verdict.sensitivity is not None]
    return [
        f"sensitivity of {case_name(record)}: {sensitivity_sentence(record.verdict.sensitivity)}"
        for record in sorted(asked, key=fixed_key)
        if record.verdict.sensitivity is not None
    ]


def step_summary(run: Run) -> str:
    """Markdown for a CI's summary page."""
    lines = [f"### equivtest: {_markdown(title(run))}", "", "| status | cases | not as expected |"]
    lines += ["| --- | ---: | ---: |"]
    lines += [
        f"| {SYMBOLS[status]} {status.value} | {count:,} | {failing:,} |"
        for status, count, failing in counts(run.records)
        if count
    ]
    found = failing_groups(run.records)
    if found:
        lines += ["", "| cases | what | where | worst case again |", "| ---: | --- | --- | --- |"]
        lines += [_step_row(group) for group in found[: 2 * _FAILURES]]
        if len(found) > 2 * _FAILURES:
            lines += ["", f"and {figures.several(len(found) - 2 * _FAILURES, 'more finding')}"]
    else:
        nearest = worst(run.records)
        if nearest is not None:
            lines += ["", f"Nearest to its tolerance: {_markdown(sentence(nearest))}"]
    ends = [*_noted(run.records), *notices(run)]
    return "\n".join([*lines, *("\n" + _markdown(text) for text in ends)]) + "\n\n"


def notices(run: Run) -> list[str]:
    """What may be missing from a run or stand for something else in it; nothing if all is well."""
    lines = []
    if run.missing:
        names = list(run.missing)[:_NAMES] + (["…"] if len(run.missing) > _NAMES else [])
        lines.append(f"warning: {missing_text(run)}: {', '.join(names)}")
    if not run.ended:
        lines.append(
            "warning: the session did not end by itself: there may be more cases than here"
        )
    if run.unreadable:
        lines.append(
            f"warning: {figures.several(len(run.unreadable), 'record')} could not be read: "
            f"{run.unreadable[0]}"
        )
    if run.replaced:
        cases = figures.several(run.replaced, "case")
        pairs = [points[-2:] for points in run.history.values()]
        changed = sum(before.status != latest.status for before, latest in pairs)
        told = f", {changed:,} with another status than in the run before" if changed else ""
        lines.append(f"note: {cases} stood in several runs; the latest counts{told}")
    return lines


def _bullet(group: Failing) -> list[str]:
    cases = figures.several(len(group.cases), "case")
    head = f"{SYMBOLS[group.status]} {group.experiment} · {group.loop}, {cases} ({group.where}): "
    return textwrap.wrap(
        head + group.text,
        98,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
        max_lines=4,
        placeholder=" …",
    )


def _step_row(group: Failing) -> str:
    what = f"{SYMBOLS[group.status]} {group.experiment} · {group.loop}: {group.text}"
    cells = (str(len(group.cases)), what, _place(group))
    return f"| {' | '.join(map(_markdown, cells))} | {_code(group.worst.rerun)} |"


def _place(group: Failing) -> str:
    """Plans and precisions, and the line of the loop that the cause speaks of."""
    source = pointed(group.worst.listings, group.worst.verdict)
    return f"{group.where}; {source.where}" if source else group.where


def _code(text: str) -> str:
    """As code in a table's cell, where nothing is escaped but what ends HTML or the cell."""
    return f"<code>{html.escape(' '.join(text.split())).replace('|', '&#124;')}</code>"


def _markdown(text: str) -> str:
    """Plain text in a table cell: no pipe, no line break, no markup of its own."""
    for character in "\\`*_[]<>|#":
        text = text.replace(character, f"\\{character}")
    return " ".join(text.split())
