"""A case as text for an issue or a commit message."""

from __future__ import annotations

from equivtest.compare.prose import explain
from equivtest.report.pointing import sources
from equivtest.report.record import Record
from equivtest.report.summary import case_name


def pasted(record: Record) -> str:
    """Who it is, the whole verdict, the lines it speaks of, where it ran; Markdown, fenced."""
    environment = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    parts = [case_name(record), explain(record.verdict), _lines(record)]
    parts.append(f"{environment}\nRerun: {record.rerun}")
    told = "\n\n".join(filter(None, parts))
    fence = "`" * max(3, 1 + _longest_run(told, "`"))
    return f"{fence}text\n{told}\n{fence}"


def _lines(record: Record) -> str:
    """The lines of the loop that the causes speak of, with their places."""
    return "\n".join(
        f"{source.file}:{line.number}: {line.text.strip()}"
        for source in sources(record.listings, record.verdict)
        for line in source.hot
    )


def _longest_run(text: str, character: str) -> int:
    """So that a fence is longer than any in the text."""
    longest = run = 0
    for one in text:
        run = run + 1 if one == character else 0
        longest = max(longest, run)
    return longest
