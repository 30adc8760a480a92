"""Failures that are one finding: the same status and cause (of errors, the same message) of one
experiment and loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.compare import figures
from equivtest.compare.prose import finding_text, headline, margin_text
from equivtest.compare.verdict import Status
from equivtest.report.ranking import fails, fixed_key, worst_first
from equivtest.report.record import Record


@dataclass(frozen=True)
class Failing:
    """One finding; ``worst`` is the case that shows it best."""

    status: Status
    experiment: str
    loop: str
    cause: str
    cases: tuple[Record, ...]

    @property
    def worst(self) -> Record:
        return self.cases[0]

    @property
    def where(self) -> str:
        """Plans and precisions: ``m4-A1-D2, m2-A2-D2; fp32``."""
        ordered = sorted(self.cases, key=fixed_key)
        plans = list(dict.fromkeys(record.verdict.card.plan for record in ordered))
        precisions = dict.fromkeys(record.verdict.card.precision for record in ordered)
        named = ", ".join(plans) if len(plans) <= 3 else f"{len(plans)} plans"
        return f"{named}; {', '.join(precisions)}"

    @property
    def margin(self) -> str:
        return margin_text(self.worst.verdict)

    @property
    def text(self) -> str:
        """What it is, and what was seen in the worst case."""
        told = f"{sentence_case(headline(self.worst.verdict))} {evidence(self.worst)}".rstrip()
        return figures.shortened(told)


def failing_groups(records: Sequence[Record]) -> list[Failing]:
    """All failures, the worst first."""
    groups: dict[tuple[Status, str, str, str, str], list[Record]] = {}
    for record in worst_first(records):
        if fails(record):
            verdict = record.verdict
            # An error has no cause: what it says tells it from another.
            said = headline(verdict) if verdict.status is Status.ERROR else ""
            key = (verdict.status, record.experiment, record.loop, verdict.cause, said)
            groups.setdefault(key, []).append(record)
    return [Failing(*key[:4], cases=tuple(cases)) for key, cases in groups.items()]


def evidence(record: Record) -> str:
    """The first finding, where the headline is not already that."""
    verdict = record.verdict
    if not verdict.findings or verdict.findings[0].text == headline(verdict):
        return ""
    text = sentence_case(finding_text(verdict.findings[0]))
    return text if text.endswith((".", "!", "?")) else f"{text}."


def sentence_case(text: str) -> str:
    """A capital at the start, but for names: ``head.weight`` and ``m2-A4-D2`` stay as they are."""
    word = text.partition(" ")[0].rstrip(",;:")
    return text[:1].upper() + text[1:] if word.isalpha() else text
