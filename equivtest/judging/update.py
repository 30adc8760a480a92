"""One update: the reference arms beside it, the comparisons, and what they find."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from equivtest.arms.oracle import JITTERS, Whole
from equivtest.compare import beside, figures
from equivtest.compare.arms import UpdateArms
from equivtest.compare.clip import Clip
from equivtest.compare.gradient import (
    AgainstOracle,
    AgainstReplay,
    against_oracle,
    decides,
    smallest_weight_seen,
    vanished,
)
from equivtest.compare.held import frozen, unheld, unheld_note
from equivtest.compare.norm_clip import NormClip
from equivtest.compare.skips import by_itself
from equivtest.compare.skips import skips as judge_skips
from equivtest.compare.split import beside_cut, undecided, undecided_finding
from equivtest.compare.tables import SourceRow, TensorRow, UpdateRow
from equivtest.compare.telling import (
    gradient_findings,
    over,
    rounding_note,
    split_finding,
    sums_finding,
    vanished_note,
)
from equivtest.compare.together import Together, states_together, together, together_note
from equivtest.compare.verdict import Finding
from equivtest.compare.weights import Weights, fit
from equivtest.diagnose.by_example import ExampleWeight, by_example
from equivtest.diagnose.diagnosis import Diagnosis
from equivtest.diagnose.gathering import gathered
from equivtest.diagnose.modes import changed_modes
from equivtest.diagnose.nonfinite import nonfinite
from equivtest.diagnose.randomness import repeated
from equivtest.diagnose.weighing import Weighed, overflowed, weighed
from equivtest.distance import norm
from equivtest.isolate.explained import Explained
from equivtest.isolate.sums import LoopSums, reproduced
from equivtest.judging import sources
from equivtest.judging.loop import Loop, held, loop_of
from equivtest.judging.rows import isolated, tensor_row, update_row
from equivtest.observe.trace import UpdateTrace


@dataclass(frozen=True)
class Judged:
    """What was found in one update.

    Attributes:
        row, rows: the update, and its tensors.
        weights: (update, replica, microbatch, expected, found, sigma), where they were fitted.
        oracle: the oracle's gradient by name, where it was computed.
        smallest_weight_seen: see ``Card``.
        counts: supervised elements by replica and microbatch, as the experiment's loss counts them.
        planned_loss: the replay's; None where the loss is no sum over microbatches.
        dtypes: that the replay's forwards saved.
        seen: the update by rank, with the gradient that was judged.
        explained: what its sources are, where the split diverges; ``skipped``, where a skip tells
            the arms apart.
        diagnoses: causes that were named with the tensors at hand.
        weighed: what the gradient is made of, where it is not the plan's.
        example_weights: by example, where those tell what weights by microbatch do not.
    """

    row: UpdateRow
    rows: tuple[TensorRow, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    weights: tuple[tuple[int, int, int, float, float, float], ...]
    oracle: dict[str, Tensor | None] | None
    smallest_weight_seen: float | None
    counts: Mapping[tuple[int, int], float]
    planned_loss: float | None
    dtypes: frozenset[str]
    seen: tuple[UpdateTrace, ...]
    explained: Explained | None = None
    skipped: Explained | None = None
    diagnoses: tuple[Diagnosis, ...] = ()
    weighed: Weighed | None = None
    example_weights: tuple[ExampleWeight, ...] = ()


def judge_update(
    arms: UpdateArms,
    clip: Clip | None,
    *,
    always_oracle: bool,
    known_sources: Sequence[SourceRow] = (),
) -> Judged:
    """Judge one update of all ranks.

    Args:
        clip: the experiment's.
        always_oracle: run the oracle even where the loop is acquitted: for the first group of each
            shape.
        known_sources: as they were attributed in updates before.
    """
    return _UpdateJudge(arms, clip, known_sources).judge(always_oracle)


@dataclass(frozen=True)
class _Compared:
    """What comparisons of a loop's gradient say.

    Attributes:
        c: against the oracle, where it was asked.
        sums: what the loop's own sums lose, where those are why it is beyond A.
        as_one: the group as one batch, where its loss is not a sum over microbatches.
        weights: fitted, where nothing else says what the gradient is made of.
    """

    c: AgainstOracle | None = None
    sums: LoopSums | None = None
    as_one: Together | None = None
    weights: Weights | None = None


@dataclass
class _UpdateJudge:
    arms: UpdateArms
    clip: Clip | None
    known_sources: Sequence[SourceRow]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    diagnoses: list[Diagnosis] = field(default_factory=list)
    weight_rows: tuple[tuple[int, int, int, float, float, float], ...] = ()
    explained: Explained | None = None
    skipped: Explained | None = None
    weighed: Weighed | None = None
    example_weights: tuple[ExampleWeight, ...] = ()

    def judge(self, always_oracle: bool) -> Judged:
        arms, u, case = self.arms, self.arms.u, self.arms.case
        self.findings += beside.buffers(u, arms.replay, arms.seen, case.plan.A, case.precision)
        left_out = self._overflowing() | self._unheld()
        loop = loop_of(arms, self.clip, left_out)
        self.notes += loop.notes
        self.diagnoses += [*loop.diagnoses, *changed_modes(arms)]
        self.findings += frozen(u, loop.seen, arms.names)
        if any(one.skipped for one in loop.a):
            self.weighed = overflowed(arms, loop.seen)
        judged = not all(one.skipped for one in loop.a)
        loss = beside.candidate_loss(loop.seen, arms.replay, arms.counts)
        compared, rows = self._compared(loop, loss, always_oracle) if judged else (_Compared(), ())
        oracle = None if compared.c is None else arms.oracle
        weight_seen = self._resolution(loop, compared, rows) if judged else None
        return Judged(
            row=self._row(loop, loss, oracle),
            rows=rows,
            findings=tuple(self.findings),
            notes=tuple(self.notes),
            weights=self.weight_rows,
            oracle=None if oracle is None else dict(zip(arms.names, oracle.gradients, strict=True)),
            smallest_weight_seen=weight_seen,
            counts={place: sum(counts) for place, counts in arms.replay.counts.items()},
            planned_loss=arms.replay.loss if compared.as_one is None else None,
            dtypes=arms.replay.dtypes,
            seen=tuple(loop.seen),
            explained=self.explained,
            skipped=self.skipped,
            diagnoses=tuple(self.diagnoses),
            weighed=self.weighed,
            example_weights=self.example_weights,
        )

    # -- what is not judged

    def _overflowing(self) -> frozenset[str]:
        """Judge what was skipped; parameters whose gradient is not finite, and so not judged."""
        arms, replay, gradients = self.arms, self.arms.replay, held(self.arms, self.arms.seen)
        planned = arms.finite([replay.expected])
        # What a scaler looks at, where there is one: a sum may overflow in the case's dtype.
        scaled = [] if arms.seen[0].scale is None else [replay.reduced]
        right = arms.finite([replay.expected, *scaled])
        overflowed = [n for n in arms.names if replay.shared and not planned[n]]
        skips = judge_skips(arms.u, arms.seen, right, arms.finite(gradients), overflowed)
        if arms.u == 0 and not all(right.values()):
            arms.oracle.check_finite()
        self.findings += by_itself(skips.findings, lambda: arms.oracle.finite)
        self.diagnoses += nonfinite(arms, gradients, self.findings)
        told = sources.overflowed(arms, skips)
        self.skipped = told.explained
        self.findings += told.findings
        self.notes += told.notes
        return skips.names

    def _unheld(self) -> frozenset[str]:
        """Parameters that no optimizer holds: only a clip by norm makes use of their gradients."""
        if isinstance(self.clip, NormClip):
            return frozenset()
        names = unheld(self.arms.seen[0], self.arms.names)
        self.notes += unheld_note(self.arms.traces[0], names)
        return names

    # -- the comparisons

    def _compared(
        self, loop: Loop, loss: float | None, always_oracle: bool
    ) -> tuple[_Compared, tuple[TensorRow, ...]]:
        """Compare, and find what differs."""
        arms = self.arms
        compared = self._comparisons(loop, always_oracle)
        c, as_one = compared.c, compared.as_one
        states = self._states(loop, compared)
        if c is not None:
            states = self._without_vanished(loop, states, c)
            self._split(loop, compared, states)
        self.findings += gradient_findings(arms.u, arms.names, states, loop.a, compared.weights)
        if "differs" in states and as_one is None:  # else it is not made of the microbatches'
            self._weigh(loop, compared)
        self._losses(loss, c)
        return compared, self._rows(loop, states, compared)

    def _comparisons(self, loop: Loop, always_oracle: bool) -> _Compared:
        arms = self.arms
        vanishing = any(norm(e) == 0 for e in arms.replay.expected)
        right = not loop.acquitted and reproduced(loop.gradients, arms.replay, arms.case.plan.D)
        c = sums = as_one = weights = None
        if not loop.acquitted or vanishing or always_oracle or arms.drew:
            c = self._against_oracle(loop, full_floor=not (loop.acquitted or right))
        if right and c is not None:
            sums = sources.in_sums(arms, loop.gradients[0], loop.a, c)
        if not loop.acquitted and c is not None:
            as_one = together(arms, loop.gradients, c)
        if not loop.acquitted and sums is None and as_one is None:
            weights = self._weights(loop, () if c is None else c.null)
        return _Compared(c, sums, as_one, weights)

    def _states(self, loop: Loop, compared: _Compared) -> list[str]:
        """What each tensor is found to be, by position: see ``TensorRow.state``."""
        arms, a, c, as_one = self.arms, loop.a, compared.c, compared.as_one
        precision = arms.case.precision
        if as_one is not None:
            self.notes += together_note(as_one)
            self.diagnoses += gathered(arms.u, arms.names, as_one, loop.seen)
            return states_together(as_one, decides(a, arms.replay, c, None, precision))
        if compared.sums is not None:
            return ["equal" if one.within else "rounding" for one in a]
        states = decides(a, arms.replay, c, compared.weights, precision)
        if c is not None:
            states = beside_cut(arms, loop.gradients, states, a, c)
        self.notes += rounding_note(arms.u, states)
        return states

    def _split(self, loop: Loop, compared: _Compared, states: Sequence[str]) -> None:
        """What the split makes of the large batch's gradient, and what explains it."""
        arms, c, as_one = self.arms, compared.c, compared.as_one
        assert c is not None
        if as_one is None or not as_one.whole:
            self.findings += self._explaining(c, loop.a, compared.sums)
        if c.drew:
            self.diagnoses += repeated(arms.u, arms.microbatches, arms.microbatches_before)
        if self.explained is not None and self.explained.within:
            left = undecided(states, loop.a, c)
            self.findings += undecided_finding(arms.u, arms.names, loop.a, left)

    def _explaining(
        self, c: AgainstOracle, a: Sequence[AgainstReplay], sums: LoopSums | None
    ) -> list[Finding]:
        """What comparison B found, or the loop's sums lose: sources explain it, or none does."""
        arms = self.arms
        found = split_finding(arms.u, arms.names, c, arms.group.shape)
        found += [] if sums is None else sums_finding(arms.u, arms.names, a)
        told = sources.explained(arms, c, sums, beyond=bool(found), known=self.known_sources)
        if told is None:
            if found and arms.case.isolate == "never":
                self.notes.append("sources were not isolated (isolate='never'): none is named")
            return found
        self.explained = told
        self.notes += told.notes
        return list(told.findings) if told.within else found

    def _weigh(self, loop: Loop, compared: _Compared) -> None:
        """What the gradient is made of, by microbatch and, where that does not tell, by example."""
        arms = self.arms
        null = () if compared.c is None else compared.c.null
        self.weighed = weighed(arms, loop.seen, loop.gradients, loop.a, compared.weights, null)
        told = by_example(arms, loop.gradients[0]) if self.weighed.left else None
        if told is not None:
            self.example_weights = told.rows
            self.notes.append(told.note)

    def _resolution(
        self, loop: Loop, compared: _Compared, rows: Sequence[TensorRow]
    ) -> float | None:
        """The smallest error of a weight that was seen; a note where only C could see one."""
        rounded = compared.sums is None and any(row.state == "rounding" for row in rows)
        seen = smallest_weight_seen(loop.a, self.arms.replay, compared.c if rounded else None)
        if rounded and seen is not None:
            self.notes += [
                f"update {self.arms.u}: beside that rounding an error below "
                f"{figures.per_cent(seen)} of one microbatch's weight can pass"
            ]
        return seen

    def _rows(
        self, loop: Loop, states: Sequence[str], compared: _Compared
    ) -> tuple[TensorRow, ...]:
        arms, a, sums = self.arms, loop.as_received, compared.sums
        if loop.corrected:  # what was taken out for others to be seen was there
            states = [s if one.within else "differs" for s, one in zip(states, a, strict=True)]
        rows = [
            tensor_row(
                arms.u,
                t,
                arms.names[t],
                states[t],
                loop.received[one.rank][t],
                one,
                compared.c,
            )
            for t, one in enumerate(a)
        ]
        if self.explained is not None:
            rows = isolated(rows, self.explained)
        if sums is not None:
            rows = [replace(row, exact_distance=d) for row, d in zip(rows, sums.left, strict=True)]
        return tuple(rows)

    def _against_oracle(self, loop: Loop, full_floor: bool) -> AgainstOracle:
        arms = self.arms
        if not arms.group.counted:
            arms.oracle.check()
        return against_oracle(
            loop.gradients,
            arms.replay,
            arms.split,
            arms.oracle,
            arms.large,
            arms.case.precision,
            full_floor,
        )

    def _weights(self, loop: Loop, null: Sequence[bool]) -> Weights:
        """Contribution weights on the rank that is furthest from the replay."""
        replay = self.arms.replay
        kept = self.arms.replayed(keep=True)
        furthest = max(loop.a, key=lambda one: over(one.distance, one.tolerance)).rank
        weights = fit(kept.parts, replay.expected, loop.gradients[furthest], replay.scale, null)
        self.weight_rows = tuple(
            (self.arms.u, r, k, 1.0, weight, weights.sigma[r, k])
            for (r, k), weight in sorted(weights.found.items())
        )
        return weights

    def _without_vanished(self, loop: Loop, states: Sequence[str], c: AgainstOracle) -> list[str]:
        """Gradients that are all zeros where the oracle's are not were not compared."""
        arms = self.arms
        gone = [
            t
            for t, state in enumerate(states)
            if state == "equal"
            and not c.null[t]
            and vanished(loop.gradients, arms.oracle.gradients, t)
        ]
        names = [arms.names[t] for t in gone]
        self.notes += vanished_note(arms.u, names, arms.case.precision.name)
        return ["not judged" if t in gone else state for t, state in enumerate(states)]

    def _losses(self, loss: float | None, c: AgainstOracle | None) -> None:
        arms = self.arms
        if c is not None and c.split_failures and not (arms.replay.shared and c.repeatable):
            return  # other random numbers or another cut, another loss: no evidence
        values = beside.Losses(
            found=loss,
            replayed=arms.replay.loss,
            scale=arms.replay.loss_sum,
            oracle=None if c is None else arms.oracle.loss,
            large=None if c is None else arms.large.loss,
            # Of one microbatch, which no cut changes, the oracle draws numbers of its own; and it
            # runs in the modes that the model was built in, from the parameters of rank 0, which do
            # not move before the update.
            split_right=c is None
            or not (
                c.split_failures
                or c.drew
                or arms.drew
                or arms.switched
                or arms.own_parameters
                or arms.between
            ),
        )
        findings, notes = beside.losses(arms.u, values, arms.case.precision)
        if findings and c is not None:
            values = replace(values, nudged=[arms.large.jittered_loss(k) for k in range(JITTERS)])
            findings, notes = beside.losses(arms.u, values, arms.case.precision)
        self.findings += findings
        self.notes += notes

    def _row(self, loop: Loop, loss: float | None, oracle: Whole | None) -> UpdateRow:
        return update_row(
            self.arms.group,
            loop.seen[0],
            loop.gradients[0],
            self.arms.replay,
            supervised=_supervised(loop, self.arms.counts),
            loss=loss,
            oracle_loss=None if oracle is None else oracle.loss,
        )


def _supervised(loop: Loop, planned: Mapping[str, float]) -> float:
    """Elements that the losses of the update counted, or else those of the plan's group."""
    counts = [m.counts for one in loop.seen for m in one.microbatches]
    return sum(map(sum, counts)) if counts and all(counts) else sum(planned.values())
