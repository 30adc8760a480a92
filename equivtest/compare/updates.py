"""The updates of a case one after the other, each on the examples that it used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from equivtest.arms.case import Case
from equivtest.arms.reference import Reference
from equivtest.causes import Cause
from equivtest.compare.arms import UpdateArms
from equivtest.compare.clip import Clip
from equivtest.compare.decay import decayed_between
from equivtest.compare.each import one_by_one
from equivtest.compare.tables import SourceRow
from equivtest.compare.update import Judged, judge_update
from equivtest.compare.used import beside_the_plan, used_groups
from equivtest.observe.trace import Trace


class UpdatesJudge:
    """Judges the updates of a case.

    Attributes:
        case: with the groups that updates are judged on: of a loop with a loader of its own, the
            examples that it used.
        as_planned: updates that used other examples and whose gradient is the plan's all the same:
            a loop may weigh by zero what it was padded with.
    """

    def __init__(
        self, reference: Reference, case: Case, traces: Sequence[Trace], clip: Clip | None
    ) -> None:
        self._reference, self._planned, self._traces, self._clip = reference, case, traces, clip
        self._shapes: set[object] = set()
        groups = one_by_one(case, traces) or used_groups(case, traces)
        self.case = replace(case, groups=groups)
        self.as_planned: list[int] = []

    def judge(
        self, u: int, known_sources: Sequence[SourceRow], decay: Mapping[str, float]
    ) -> Judged:
        """Judge update ``u``.

        Args:
            decay: the experiment's weight decay by the names of parameters.
        """
        arms = self._arms(self.case, u)
        judged = self._judged(arms, known_sources)
        decayed = decayed_between(arms.seen[0], len(self.case.groups[u].ids[0]), decay)
        if decayed:
            moving = replace(arms, between=decayed)
            again = self._judged(moving, known_sources, oracle=False)
            if moving.replay.shared > arms.replay.shared or _beside(again) < _beside(judged):
                judged = again
        planned, used = self._planned.groups[u], self.case.groups[u]
        if _differs(judged) and beside_the_plan(planned, used):
            by_plan = self._judged(self._arms(self._planned, u), known_sources)
            if not _differs(by_plan):
                judged = by_plan
                self.as_planned.append(u)
                groups = (*self.case.groups[:u], planned, *self.case.groups[u + 1 :])
                self.case = replace(self.case, groups=groups)
        if judged.oracle is not None:
            self._shapes.add(self.case.groups[u].shape)
        return judged

    def _arms(self, case: Case, u: int) -> UpdateArms:
        return UpdateArms(self._reference, case, self._traces, u)

    def _judged(
        self, arms: UpdateArms, known_sources: Sequence[SourceRow], oracle: bool = True
    ) -> Judged:
        """Judge one update; ``oracle``: beside the oracle too, for the first of each shape."""
        new = arms.group.shape not in self._shapes
        return judge_update(
            arms, self._clip, always_oracle=oracle and new, known_sources=known_sources
        )


def _differs(judged: Judged) -> bool:
    return any(finding.cause == Cause.GRADIENT for finding in judged.findings)


def _beside(judged: Judged) -> int:
    """How many of gradient and loss are beside the plan."""
    return len({f.cause for f in judged.findings} & {Cause.GRADIENT, Cause.LOSS})
