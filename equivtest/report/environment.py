"""The environment of a whole run, and what differs between those of two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.report.ranking import fixed_key
from equivtest.report.record import Record


@dataclass(frozen=True)
class Difference:
    """A property that two runs do not share; None for the run that does not have it."""

    name: str
    old: str | None
    new: str | None


def run_environment(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Each property with its value; with all values where shards differ."""
    found: dict[str, dict[str, None]] = {}
    for record in sorted(records, key=fixed_key):
        for name, value in record.environment.items():
            found.setdefault(name, {})[value] = None
    return [(name, " / ".join(sorted(values))) for name, values in found.items()]


def differences(old: Sequence[Record], new: Sequence[Record]) -> tuple[Difference, ...]:
    """Properties with other values, or of one run only; in the old run's order, then the new's."""
    before, after = dict(run_environment(old)), dict(run_environment(new))
    return tuple(
        Difference(name, before.get(name), after.get(name))
        for name in before | after
        if before.get(name) != after.get(name)
    )
