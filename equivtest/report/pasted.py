"""A case as text for an issue or a commit message."""

from __future__ import annotations

from equivtest.compare.prose import explain
from equivtest.report.record import Record
from equivtest.report.summary import case_name


def pasted(record: Record) -> str:
    """Who it is, the whole verdict, where it ran and how to run it again; Markdown, fenced."""
    environment = ", ".join(f"{name} {value}" for name, value in record.environment.items())
    parts = (case_name(record), explain(record.verdict), f"{environment}\nRerun: {record.rerun}")
    told = "\n\n".join(parts)
    fence = "`" * max(3, 1 + _longest_run(told, "`"))
    return f"{fence}text\n{told}\n{fence}"


def _longest_run(text: str, character: str) -> int:
    """So that a fence is longer than any in the text."""
    longest = run = 0
    for one in text:
        run = run + 1 if one == character else 0
        longest = max(longest, run)
    return longest
