"""What a family of causes says: a cause, its evidence, and the findings that it accounts for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from equivtest.causes import Cause
from equivtest.compare.verdict import Finding
from equivtest.distance import MaybeTensors


@dataclass(frozen=True)
class Covers:
    """Findings that a cause accounts for: those of general causes, in some updates and tensors.

    None for updates or tensors is all of them. ``findings``, where given, are those that are meant:
    what one general cause says of a tensor may have two reasons.
    """

    causes: Collection[str]
    updates: Collection[int] | None = None
    tensors: Collection[str] | None = None
    findings: Collection[Finding] | None = None

    def holds(self, finding: Finding) -> bool:
        """The finding is one of these."""
        return (
            finding.cause in self.causes
            and (self.updates is None or finding.update is None or finding.update in self.updates)
            and (self.tensors is None or finding.tensor is None or finding.tensor in self.tensors)
            and (self.findings is None or finding in self.findings)
        )


def exactly(findings: Collection[Finding]) -> tuple[Covers, ...]:
    """These findings and no other."""
    return (Covers({f.cause for f in findings}, findings=tuple(findings)),) if findings else ()


@dataclass(frozen=True)
class Diagnosis:
    """A named cause.

    Attributes:
        cause: of any kind but a source.
        text: one sentence: why we think so, with the figures.
        covers: findings that it accounts for; several where one predicate does not say it.
        update, rank, tensor: where it was seen first.
        alternatives: other causes that predict the same here.
    """

    cause: Cause
    text: str
    covers: tuple[Covers, ...] = ()
    update: int | None = None
    rank: int | None = None
    tensor: str | None = None
    alternatives: tuple[Cause, ...] = ()


@dataclass(frozen=True)
class Corrected:
    """What the loop left, by rank, without what a cause took away; and that cause."""

    gradients: Sequence[MaybeTensors]
    diagnosis: Diagnosis
