"""The updates of a case one after the other, each on the examples that it used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from equivtest.arms.case import Case
from equivtest.arms.reference import Reference
from equivtest.causes import Cause
from equivtest.compare.arms import UpdateArms
from equivtest.compare.clip import Clip
from equivtest.compare.decay import decayed_between
from equivtest.compare.each import one_by_one
from equivtest.compare.tables import SourceRow
from equivtest.compare.used import beside_the_plan, misused, used_groups
from equivtest.judging.update import Judged, judge_update
from equivtest.observe.trace import Trace
from equivtest.plan import GroupLayout


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
        self._odd = misused(case, traces)
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
        if _differs(judged):
            judged = self._otherwise(u, known_sources) or judged
        if judged.oracle is not None:
            self._shapes.add(self.case.groups[u].shape)
        return judged

    def _otherwise(self, u: int, known_sources: Sequence[SourceRow]) -> Judged | None:
        """The update as it is right, where it is on what else it may have been meant to use."""
        for group in self._others(u):
            groups = (*self.case.groups[:u], group, *self.case.groups[u + 1 :])
            other = replace(self.case, groups=groups)
            judged = self._judged(self._arms(other, u), known_sources)
            if not _differs(judged):
                self.case = other
                self.as_planned += [u] if group is self._planned.groups[u] else []
                return judged
        return None

    def _others(self, u: int) -> Iterator[GroupLayout]:
        """What else the gradient of an update may be that used other examples than the plan's.

        The plan's own; or, where examples came twice or never, what was used divided by the plan's
        count: that loop has one fault, and not another denominator.
        """
        planned, used = self._planned.groups[u], self.case.groups[u]
        if used.counted or not beside_the_plan(planned, used):
            return
        yield planned
        if u in self._odd and self._reference.total(planned) != self._reference.total(used):
            yield replace(used, counted=planned.flat)

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
