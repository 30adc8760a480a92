"""The outcome of a case: frozen, complete, and readable by a tired person."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING

from equivtest.causes import Cause, Kind
from equivtest.compare.figures import orderly
from equivtest.compare.sensitivity import Sensitivity
from equivtest.compare.tables import (
    EventRow,
    ExampleRow,
    MicrobatchRow,
    SourceRow,
    TensorRow,
    UpdateRow,
)

if TYPE_CHECKING:
    import pandas as pd

Expectation = str | Collection[str]


class Status(StrEnum):
    """What a verdict says; the meaning of each is in the README."""

    EQUIVALENT = "equivalent"
    EXPLAINED = "explained"
    FAULT = "fault"
    UNEXPLAINED = "unexplained"
    INCONCLUSIVE = "inconclusive"
    NOT_RUN = "not-run"
    ERROR = "error"


class About(StrEnum):
    """What a finding in general terms is about, for the causes that may account for it."""

    PARAMETER = "a parameter"
    BETWEEN_UPDATES = "a parameter between updates"
    AVERAGE = "the average of weights"
    COUNTER = "the optimizer's counter"
    DECAY = "weight decay alone"
    REPEATING = "whether a forward repeats"
    SPLIT = "the split without any loop"
    DIVERGING = "the experiment itself"
    SUMS = "what the loop's own sums lose"


@dataclass(frozen=True)
class Finding:
    """One thing that is beside the plan, with its evidence.

    Attributes:
        cause: value of a ``Cause``; empty for what is found but cannot be named.
        text: one sentence with the figures.
        update, rank, tensor: where; None where it concerns all.
        distance, tolerance: relative, where a distance decided.
        alternatives: causes that would show the same here.
        about: an ``About``, where it matters.
    """

    cause: str
    text: str
    update: int | None = None
    rank: int | None = None
    tensor: str | None = None
    distance: float | None = None
    tolerance: float | None = None
    alternatives: tuple[str, ...] = ()
    about: str = ""


@dataclass(frozen=True)
class Card:
    """The final sheet of a case: what was run and counted. ``None`` means it was not observed.

    ``smallest_weight_seen`` is the smallest relative error of one microbatch's weight that the
    comparison with the replay would have seen in the first update, whichever microbatch had it.
    ``cap`` is the noise floor above which the precision judges no tensor against the oracle.
    """

    plan: str
    m: str
    A: int
    D: int
    processes: int
    examples: int
    dp_group: tuple[int, ...]
    precision: str
    device: str
    backend: str
    optimizer: str
    normalisation: str
    last_group: str
    last_group_examples: tuple[int, ...]
    dropped_examples: tuple[int, ...]
    microbatches: int | None = None
    updates_attempted: int | None = None
    updates_applied: int | None = None
    examples_seen: int | None = None
    supervised: float | None = None
    scheduler_unit: str = ""
    first_peak_bytes: int | None = None
    later_peak_bytes: int | None = None
    null_tensors: tuple[str, ...] = ()
    blind_tensors: tuple[str, ...] = ()
    not_judged: tuple[str, ...] = ()
    smallest_weight_seen: float | None = None
    cap: float | None = None


@dataclass(frozen=True)
class Failure:
    """Why a case could not finish."""

    text: str
    rank: int | None = None
    what: str = ""


@dataclass(frozen=True)
class Verdict:
    """What ``check`` returns.

    Attributes:
        status: a ``Status``.
        causes: names of what is beside the plan, the most telling first.
        notes: what is right but worth saying (costs, conventions, what was not judged).
        margin: largest distance over tolerance among the deciding comparisons; below 1 is within.
        rows: a ``TensorRow`` for each tensor and update (``tensors`` is the same as a frame).
        weight_rows: (update, replica, microbatch, expected, found, sigma), where the weights were
            needed to decide (``weights`` is the same as a frame).
        example_weight_rows: (update, example, expected, found, sigma), where weights by microbatch
            do not tell what the gradient holds and those by example do (``example_weights``).
        source_rows: the sources that were isolated, over all updates (``sources`` is their shares
            by name).
        remainder: share of the squared distance that is left with all of them isolated; None where
            none was.
        ranks: for each rank, whether it agrees with rank 0, in a sentence.
        events: what each rank did, in order.
        examples: which examples each microbatch received, beside the plan's.
        microbatches: what each microbatch counted and held.
        card: the final sheet.
        sensitivity: what a fault would have to be to be seen here; None unless it was asked for.
    """

    status: Status
    card: Card
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[TensorRow, ...] = ()
    updates: tuple[UpdateRow, ...] = ()
    weight_rows: tuple[tuple[int, int, int, float, float, float], ...] = ()
    example_weight_rows: tuple[tuple[int, int, float, float, float], ...] = ()
    source_rows: tuple[SourceRow, ...] = ()
    remainder: float | None = None
    ranks: tuple[str, ...] = ()
    events: tuple[EventRow, ...] = ()
    examples: tuple[ExampleRow, ...] = ()
    microbatches: tuple[MicrobatchRow, ...] = ()
    failure: Failure | None = None
    sensitivity: Sensitivity | None = None
    expect: tuple[str, ...] = ("equivalent",)
    duration_s: float = 0.0

    @cached_property
    def causes(self) -> tuple[str, ...]:
        """Names of what is beside the plan, the most telling first."""
        return tuple(dict.fromkeys(str(f.cause) for f in self.findings if f.cause))

    @property
    def cause(self) -> str:
        """The first cause, or an empty string."""
        return self.causes[0] if self.causes else ""

    @property
    def sources(self) -> dict[str, float]:
        """Share of the squared distance by isolated source."""
        return {row.source: row.share for row in self.source_rows}

    @property
    def passed(self) -> bool:
        """The verdict is the one expected: the same status, or the expected causes and no other.

        What was found and could not be named is another.
        """
        if len(self.expect) == 1 and self.expect[0] in set(Status):
            return self.status == self.expect[0]
        named = all(finding.cause for finding in self.findings)
        causes = set(self.causes)
        return named and causes <= set(self.expect) <= causes | set(self.noted)

    @cached_property
    def noted(self) -> tuple[str, ...]:
        """Causes that are no mistakes, which notes name: costs, logs and conventions."""
        heads = [Cause.named(note.partition(": ")[0]) for note in self.notes]
        return tuple(dict.fromkeys(str(head) for head in heads if head))

    @cached_property
    def margin(self) -> float:
        judged = (row.margin for row in self.rows if row.state != "not judged")
        return max(judged, key=orderly, default=math.nan)

    @cached_property
    def replay_margin(self) -> float | None:
        return _largest(row.replay_margin for row in self.rows)

    @cached_property
    def split_margin(self) -> float | None:
        return _largest(row.split_margin for row in self.rows)

    @cached_property
    def oracle_margin(self) -> float | None:
        return _largest(row.oracle_margin for row in self.rows if not (row.null or row.blind))

    @cached_property
    def worst(self) -> TensorRow | None:
        """The row with the largest margin, among those judged if any were."""
        judged = [row for row in self.rows if row.state != "not judged"]
        return max(judged or self.rows, key=lambda row: orderly(row.margin), default=None)

    @property
    def tensors(self) -> pd.DataFrame:
        """A row a tensor and update: the fields of ``TensorRow`` and the margins."""
        import pandas as pd

        margins = ("margin", "replay_margin", "split_margin", "isolated_margin", "oracle_margin")
        return pd.DataFrame(
            [vars(row) | {name: getattr(row, name) for name in margins} for row in self.rows]
        )

    @property
    def weights(self) -> pd.DataFrame:
        """Contribution weights: a row an update, replica and microbatch, expected beside found."""
        import pandas as pd

        names = ("update", "replica", "microbatch", "expected", "found", "sigma")
        return pd.DataFrame(list(self.weight_rows), columns=list(names))

    @property
    def example_weights(self) -> pd.DataFrame:
        """Contribution weights by example: a row an update and example, expected beside found."""
        import pandas as pd

        names = ("update", "example", "expected", "found", "sigma")
        return pd.DataFrame(list(self.example_weight_rows), columns=list(names))

    def explain(self) -> str:
        """The verdict in prose: what is wrong, why we think so, what to change, the numbers."""
        from equivtest.compare.prose import explain

        return explain(self)


def status_of(findings: Collection[Finding]) -> Status | None:
    """What findings mean; None where there is none.

    A named fault is one; what has no name is unexplained; sources and conventions explain.
    """
    causes = [Cause.named(finding.cause) for finding in findings]
    kinds = {cause.kind if cause else None for cause in causes}
    if Kind.FAULT in kinds:
        return Status.FAULT
    if None in kinds:
        return Status.UNEXPLAINED
    return Status.EXPLAINED if kinds else None


def expectation(expect: Expectation) -> tuple[str, ...]:
    """``expect`` as a sorted tuple of one status or of causes.

    Raises:
        ValueError: a name that is neither a status nor a cause, or a status among causes.
    """
    several = (
        expect if isinstance(expect, Collection) and not isinstance(expect, str) else (expect,)
    )
    names = tuple(sorted(set(map(str, several))))
    statuses, causes = set(map(str, Status)), set(map(str, Cause))
    unknown = [name for name in names if name not in statuses and name not in causes]
    if unknown or not names:
        near = [n for one in unknown for n in get_close_matches(one, [*statuses, *causes], 3)]
        meant = f" (did you mean {' or '.join(dict.fromkeys(near))}?)" if near else ""
        raise ValueError(
            f"expect={expect!r}{meant}: pass a status ({', '.join(Status)}), a cause or a set of "
            f"causes ({', '.join(Cause)})"
        )
    if len(names) > 1 and any(name in statuses for name in names):
        raise ValueError(f"expect={expect!r}: pass one status, or a set of causes, not both")
    return tuple(str(name) for name in names)


def _largest(margins: Iterable[float | None]) -> float | None:
    return max((m for m in margins if m is not None), key=orderly, default=None)
