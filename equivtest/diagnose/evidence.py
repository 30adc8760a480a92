"""What families of causes look at: records of a case that has run, nothing that computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from equivtest.arms.case import Case
from equivtest.batches import Counts
from equivtest.compare.tables import TensorRow
from equivtest.compare.verdict import Finding
from equivtest.diagnose.weighing import Weighed
from equivtest.experiment import Experiment
from equivtest.observe.trace import Trace, UpdateTrace
from equivtest.plan import GroupLayout


@dataclass(frozen=True)
class UpdateEvidence:
    """One attempted update that the plan has a group for.

    Attributes:
        planned: the group as the plan deals it; ``used``, as it was judged: with the examples that
            a loop with a loader of its own used.
        seen: the update by rank, with the gradient that was judged.
        counts: supervised elements by replica and microbatch of ``used``, by term.
        rows: what the comparisons found of each tensor; empty where nothing was compared.
        weighed: what the gradient is made of, where it is not the plan's.
        loss: the update's normalised loss, where the loop's losses could be matched.
    """

    u: int
    planned: GroupLayout
    used: GroupLayout
    seen: Sequence[UpdateTrace]
    counts: Sequence[Sequence[Counts]]
    rows: Sequence[TensorRow] = ()
    weighed: Weighed | None = None
    loss: float | None = None


@dataclass(frozen=True)
class Evidence:
    """A case that has run.

    Attributes:
        traces: by rank, as they were observed.
        updates: those that both the plan and the loop have.
        findings: in general terms.
    """

    experiment: Experiment
    case: Case
    traces: Sequence[Trace]
    updates: Sequence[UpdateEvidence]
    findings: Sequence[Finding]

    def found(self, *causes: str) -> list[Finding]:
        """Findings of these general causes."""
        return [finding for finding in self.findings if finding.cause in causes]
