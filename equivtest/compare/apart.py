"""Replicas that decide apart whether to update: from there on they are no replicas. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from equivtest.arms.case import Case
from equivtest.observe.trace import MicrobatchTrace, Trace
from equivtest.plan import GroupLayout


class Decision(StrEnum):
    """What a rank did after the microbatches of a group."""

    APPLIED = "applied the update"
    SKIPPED = "skipped the update"
    LEFT_OUT = "asked for no update"


@dataclass(frozen=True)
class Apart:
    """The first group after which ranks decide apart, or alike that no update is asked for.

    Attributes:
        u: the group.
        decisions: by rank.
    """

    u: int
    decisions: tuple[Decision, ...]

    @property
    def judged(self) -> int:
        """Updates that can be compared: where one is left out, later ones have other numbers."""
        return self.u if Decision.LEFT_OUT in self.decisions else self.u + 1

    def __str__(self) -> str:
        told = []
        for decision in Decision:
            who = [rank for rank, own in enumerate(self.decisions) if own is decision]
            if who:
                ranks = f"rank {who[0]}" if len(who) == 1 else f"ranks {who}"
                told.append(f"{ranks} {decision.value}")
        return f"after the microbatches of group {self.u}, {' and '.join(told)}"

    @property
    def alike(self) -> bool:
        return len(set(self.decisions)) == 1


def decided_apart(case: Case, traces: Sequence[Trace]) -> Apart | None:
    """Where ranks first decide apart, or clear a whole group's gradient and ask for no update.

    None where they do neither, and where it cannot be told.
    """
    by_rank = [list(_decisions(case, trace)) for trace in traces]
    for u, decisions in enumerate(zip(*by_rank, strict=False)):
        alike = len(set(decisions)) == 1
        if not alike:
            return Apart(u, decisions)
        if Decision.LEFT_OUT in decisions:
            return Apart(u, decisions) if _cleared(case, traces, u) else None
    return None


def _cleared(case: Case, traces: Sequence[Trace], u: int) -> bool:
    """The gradient of group ``u``, a full one, was cleared before the next group's first forward.

    All groups before it had an update.
    """
    group = case.groups[u]
    return not group.partial and all(
        u < len(trace.updates)
        and any(
            operation.kind == "zero" and operation.microbatch == len(group.ids[trace.rank]) - 1
            for operation in trace.updates[u].operations
        )
        for trace in traces
    )


def _decisions(case: Case, trace: Trace) -> Iterator[Decision]:
    """By group, as long as whole groups of microbatches come before each update."""
    groups = iter(case.groups)
    for update in trace.updates:
        seen = list(update.microbatches)
        for group in groups:
            planned = len(group.ids[trace.rank])
            own, seen = seen[:planned], seen[planned:]
            if len(own) < planned or not update.observed or not _could_be(own, group, trace.rank):
                return
            if not seen:
                yield Decision.APPLIED if update.applied else Decision.SKIPPED
                break
            yield Decision.LEFT_OUT
    left = trace.left_over
    for group in groups:
        left -= len(group.ids[trace.rank])
        if left < 0:
            return
        yield Decision.LEFT_OUT


def _could_be(seen: Sequence[MicrobatchTrace], group: GroupLayout, rank: int) -> bool:
    """The examples are the group's, as far as a loop got them from the plan and they are known."""
    if any(m.ids is None or m.by_contents for m in seen):
        return True
    return {i for m in seen for i in m.ids or ()} == {i for ids in group.ids[rank] for i in ids}
