"""The outcome of a case: frozen, complete, and readable by a tired person."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from equivtest.compare.cause import Cause

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


@dataclass(frozen=True)
class Finding:
    """One thing that is beside the plan, with its evidence.

    Attributes:
        cause: value of a ``Cause``; empty for what is found but cannot be named.
        text: one sentence with the figures.
        update, rank, tensor: where; None where it concerns all.
        distance, tolerance: relative, where a distance decided.
    """

    cause: str
    text: str
    update: int | None = None
    rank: int | None = None
    tensor: str | None = None
    distance: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class TensorRow:
    """One tensor in one update, under the three comparisons (distances relative to their scale).

    ``replay_*`` is comparison A, ``split_*`` B, ``oracle_*`` C; None where it was not computed.
    ``parameter_*`` is the parameter after the update against a float64 update from the candidate's
    own gradient, relative to ``|p| + |delta|``; ``oracle_parameter_distance`` the same against the
    update of the oracle's gradient, reported and not judged.
    ``exact_distance`` is A with the loop's own addends added exactly, where it does what the plan
    says to the bit and is beyond A all the same; ``replay_tolerance`` beside it.
    ``isolated_*`` is B with the sources isolated that explain it, where they do: what is left.
    ``state`` is ``equal``, ``rounding`` (beyond A, acquitted by C or by exact sums), ``differs`` or
    ``not judged``.
    """

    update: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    state: str
    replay_distance: float | None = None
    replay_tolerance: float | None = None
    exact_distance: float | None = None
    split_distance: float | None = None
    split_tolerance: float | None = None
    isolated_distance: float | None = None
    isolated_tolerance: float | None = None
    oracle_distance: float | None = None
    oracle_tolerance: float | None = None
    noise_floor: float | None = None
    norm: float | None = None
    scale: float | None = None
    null: bool = False
    blind: bool = False
    worst_rank: int = 0
    parameter_distance: float | None = None
    parameter_tolerance: float | None = None
    oracle_parameter_distance: float | None = None

    @property
    def margin(self) -> float:
        """Largest distance over its tolerance among the comparisons that judge this tensor."""
        split = self.split_margin if self.isolated_distance is None else self.isolated_margin
        return max(self.loop_margin or 0.0, split or 0.0)

    @property
    def loop_margin(self) -> float | None:
        """That of the comparison which speaks of the loop: A, or C where that acquits."""
        if self.exact_distance is not None:
            return _ratio(self.exact_distance, self.replay_tolerance)
        return self.oracle_margin if self.state == "rounding" else self.replay_margin

    @property
    def replay_margin(self) -> float | None:
        return _ratio(self.replay_distance, self.replay_tolerance)

    @property
    def split_margin(self) -> float | None:
        return None if self.null else _ratio(self.split_distance, self.split_tolerance)

    @property
    def isolated_margin(self) -> float | None:
        return None if self.null else _ratio(self.isolated_distance, self.isolated_tolerance)

    @property
    def oracle_margin(self) -> float | None:
        return _ratio(self.oracle_distance, self.oracle_tolerance)


@dataclass(frozen=True)
class UpdateRow:
    """One attempted update of the candidate, as rank 0 saw it.

    Losses are normalised by the group's count; ``lr`` is the first param group's learning rate at
    the update, ``loss_scale`` the scaler's at the backward (None without a scaler).
    """

    update: int
    epoch: int
    examples: int
    supervised: float
    applied: bool
    loss: float | None
    oracle_loss: float | None
    lr: float | None
    loss_scale: float | None
    grad_norm: float | None
    clipped: bool
    peak_bytes: int | None
    replay_bits_equal: bool


@dataclass(frozen=True)
class SourceRow:
    """One source that was isolated.

    Attributes:
        source: its name.
        share: of the squared distance between the gradients of the split and the large batch, each
            as one vector, null tensors left out; averaged over the orders in which sources can be
            isolated, so that all shares and what is left add up to 1.
        where: where it enters, in words.
        claimed: it is among the fewest that bring the distance within tolerance.
    """

    source: str
    share: float
    where: str
    claimed: bool


@dataclass(frozen=True)
class EventRow:
    """One event of one rank, in the order in which it happened there."""

    rank: int
    update: int
    microbatch: int | None
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Card:
    """The final sheet of a case: what was run and counted. ``None`` means it was not observed.

    ``smallest_weight_seen`` is the smallest relative error of one microbatch's weight that the
    comparison with the replay would have seen in the first update, whichever microbatch had it.
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
        source_rows: the sources that were isolated, over all updates (``sources`` is their shares
            by name).
        remainder: share of the squared distance that is left with all of them isolated; None where
            none was.
        ranks: for each rank, whether it agrees with rank 0, in a sentence.
        events: what each rank did, in order.
        card: the final sheet.
    """

    status: Status
    card: Card
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    rows: tuple[TensorRow, ...] = ()
    updates: tuple[UpdateRow, ...] = ()
    weight_rows: tuple[tuple[int, int, int, float, float, float], ...] = ()
    source_rows: tuple[SourceRow, ...] = ()
    remainder: float | None = None
    ranks: tuple[str, ...] = ()
    events: tuple[EventRow, ...] = ()
    failure: Failure | None = None
    expect: tuple[str, ...] = ("equivalent",)
    duration_s: float = 0.0

    @property
    def causes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(f.cause for f in self.findings if f.cause))

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
        return named and set(self.causes) == set(self.expect)

    @property
    def margin(self) -> float:
        return max((row.margin for row in self.rows if row.state != "not judged"), default=math.nan)

    @property
    def replay_margin(self) -> float | None:
        return _largest(row.replay_margin for row in self.rows)

    @property
    def split_margin(self) -> float | None:
        return _largest(row.split_margin for row in self.rows)

    @property
    def oracle_margin(self) -> float | None:
        return _largest(row.oracle_margin for row in self.rows if not (row.null or row.blind))

    @property
    def worst(self) -> TensorRow | None:
        """The row with the largest margin, among those judged if any were."""
        judged = [row for row in self.rows if row.state != "not judged"]
        return max(judged or self.rows, key=lambda row: row.margin, default=None)

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

    def explain(self) -> str:
        """The verdict in prose: what is wrong, why we think so, what to change, the numbers."""
        from equivtest.compare.prose import explain

        return explain(self)


def expectation(expect: Expectation) -> tuple[str, ...]:
    """``expect`` as a sorted tuple of one status or of causes.

    Raises:
        ValueError: a name that is neither a status nor a cause, or a status among causes.
    """
    several = (
        expect if isinstance(expect, Collection) and not isinstance(expect, str) else (expect,)
    )
    names = tuple(sorted(set(map(str, several))))
    statuses, causes = set(Status), set(Cause)
    unknown = [name for name in names if name not in statuses and name not in causes]
    if unknown or not names:
        raise ValueError(
            f"expect={expect!r}: pass a status ({', '.join(Status)}), a cause or a set of causes "
            f"({', '.join(Cause)})"
        )
    if len(names) > 1 and any(name in statuses for name in names):
        raise ValueError(f"expect={expect!r}: pass one status, or a set of causes, not both")
    return tuple(str(name) for name in names)


def _ratio(distance: float | None, tolerance: float | None) -> float | None:
    if distance is None or tolerance is None:
        return None
    return distance / tolerance if tolerance > 0 else (math.inf if distance > 0 else 0.0)


def _largest(margins: Iterable[float | None]) -> float | None:
    return max((m for m in margins if m is not None), default=None)
