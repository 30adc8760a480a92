"""One update: the reference arms beside it, the comparisons, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from equivtest.arms.oracle import JITTERS, Whole
from equivtest.arms.replay import Replay
from equivtest.compare import beside, sources
from equivtest.compare.arms import UpdateArms
from equivtest.compare.by_hand import Against, by_hand
from equivtest.compare.clip import Clip
from equivtest.compare.gradient import (
    AgainstOracle,
    AgainstReplay,
    against_oracle,
    against_replay,
    decides,
    smallest_weight_seen,
    vanished,
)
from equivtest.compare.held import frozen, unheld, unheld_note
from equivtest.compare.norm_clip import NormClip
from equivtest.compare.rows import isolated, tensor_row, update_row
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
from equivtest.compare.together import states_together, together, together_note
from equivtest.compare.value_clip import ValueClip
from equivtest.compare.verdict import Finding
from equivtest.compare.weights import Weights, fit
from equivtest.diagnose.addends import Addends
from equivtest.diagnose.by_example import ExampleWeight, by_example
from equivtest.diagnose.clamping import clamped
from equivtest.diagnose.clip import early_note
from equivtest.diagnose.diagnosis import Corrected, Diagnosis
from equivtest.diagnose.gathering import gathered
from equivtest.diagnose.modes import changed_modes
from equivtest.diagnose.nonfinite import nonfinite
from equivtest.diagnose.precision import low_sums
from equivtest.diagnose.randomness import repeated
from equivtest.diagnose.weighing import Weighed, overflowed, weighed
from equivtest.distance import MaybeTensors, norm
from equivtest.isolate.explained import Explained
from equivtest.isolate.sums import LoopSums, in_another_order, reproduced
from equivtest.observe.trace import UpdateTrace


@dataclass(frozen=True)
class Judged:
    """What was found in one update.

    Attributes:
        row, rows: the update, and its tensors.
        weights: (update, replica, microbatch, expected, found, sigma), where they were fitted.
        oracle: the oracle's gradient by name, where it was computed.
        smallest_weight_seen: see ``Card``.
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
    return _UpdateJudge(arms, clip, known_sources, arms.seen).judge(always_oracle)


@dataclass
class _UpdateJudge:
    arms: UpdateArms
    clip: Clip | None
    known_sources: Sequence[SourceRow]
    seen: list[UpdateTrace]
    """The update by rank, with the gradient that is judged."""
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: tuple[tuple[int, int, int, float, float, float], ...] = ()
    explained: Explained | None = None
    skipped: Explained | None = None
    diagnoses: list[Diagnosis] = field(default_factory=list)
    corrected: Sequence[MaybeTensors] | None = None
    """The gradients by rank without what a named cause did to them, which others may add to."""
    as_received: list[AgainstReplay] | None = None
    """Comparison A of the gradients with it."""
    weighed: Weighed | None = None
    example_weights: tuple[ExampleWeight, ...] = ()

    def judge(self, always_oracle: bool) -> Judged:
        arms, u = self.arms, self.arms.u
        self.findings += beside.buffers(
            u, arms.replay, self.seen, arms.case.plan.A, arms.case.precision
        )
        left_out = self._overflowing() | self._unheld()
        a = self._loop(left_out)
        self.diagnoses += changed_modes(arms)
        self.findings += frozen(u, self.seen, arms.names)
        if any(one.skipped for one in a):
            self.weighed = overflowed(arms, self.seen)
        judged = not all(one.skipped for one in a)
        c, rows = self._compared(a, always_oracle) if judged else (None, ())
        oracle = None if c is None else arms.oracle
        return Judged(
            row=self._row(oracle),
            rows=rows,
            findings=tuple(self.findings),
            notes=tuple(self.notes),
            weights=self.weights,
            oracle=None if oracle is None else dict(zip(arms.names, oracle.gradients, strict=True)),
            smallest_weight_seen=smallest_weight_seen(a, arms.replay) if judged else None,
            dtypes=arms.replay.dtypes,
            seen=tuple(self.seen),
            explained=self.explained,
            skipped=self.skipped,
            diagnoses=tuple(self.diagnoses),
            weighed=self.weighed,
            example_weights=self.example_weights,
        )

    @property
    def gradients(self) -> Sequence[MaybeTensors]:
        """The candidate's by rank, as they are judged, in the order of the parameters' names."""
        return self.received if self.corrected is None else self.corrected

    @property
    def received(self) -> list[list[Tensor | None]]:
        """The candidate's by rank, as they were seen."""
        return [[update.gradient.get(name) for name in self.arms.names] for update in self.seen]

    # -- what is not judged

    def _overflowing(self) -> frozenset[str]:
        """Judge what was skipped; parameters whose gradient is not finite, and so not judged."""
        arms, replay = self.arms, self.arms.replay
        planned = arms.finite([replay.expected])
        # What a scaler looks at, where there is one: a sum may overflow in the case's dtype.
        scaled = [] if self.seen[0].scale is None else [replay.reduced]
        right = arms.finite([replay.expected, *scaled])
        overflowed = [n for n in arms.names if replay.shared and not planned[n]]
        skips = judge_skips(arms.u, self.seen, right, arms.finite(self.gradients), overflowed)
        if arms.u == 0 and not all(right.values()):
            arms.oracle.check_finite()
        self.findings += by_itself(skips.findings, lambda: arms.oracle.finite)
        self.diagnoses += nonfinite(arms, self.received, self.findings)
        told = sources.overflowed(arms, skips)
        self.skipped = told.explained
        self.findings += told.findings
        self.notes += told.notes
        return skips.names

    def _unheld(self) -> frozenset[str]:
        """Parameters that no optimizer holds: only a clip by norm makes use of their gradients."""
        if isinstance(self.clip, NormClip):
            return frozenset()
        names = unheld(self.seen[0], self.arms.names)
        self.notes += unheld_note(self.arms.traces[0], names)
        return names

    # -- the comparisons

    def _loop(self, left_out: frozenset[str]) -> list[AgainstReplay]:
        """Comparison A, on what the optimizer received where only that acquits."""
        arms = self.arms

        def against(gradients: Sequence[MaybeTensors], replay: Replay) -> list[AgainstReplay]:
            found = zip(arms.names, against_replay(gradients, replay, arms.case.plan), strict=True)
            return [replace(one, skipped=name in left_out) for name, one in found]

        a = against(self.gradients, arms.replay)
        if all(one.within for one in a):
            if arms.u == 0:  # hardly changes from update to update
                note = in_another_order(self.gradients[0], arms.replay, arms.names)
                self.notes += [note] if note else []
            self.notes += early_note(self.seen[0])
            return a
        clipped = by_hand(self.clip, self.seen, arms.names, arms.replay, against)
        if clipped is None:
            # What the loop's own order of a sum gives to the bit was not added up in another dtype.
            if reproduced(self.gradients, arms.replay, arms.case.plan.D):
                return a
            for correct in (self._clamped, self._low_sums):
                a = self._corrected(correct(a), a, against)
            return a
        self.seen = clipped.seen
        self.notes += [f"update {arms.u}: {clipped.note}"] if clipped.note else []
        return clipped.a

    def _corrected(
        self, told: Corrected | None, a: list[AgainstReplay], against: Against
    ) -> list[AgainstReplay]:
        """Comparison A without what a named cause took away."""
        if told is None:
            return a
        self.diagnoses.append(told.diagnosis)
        self.as_received, self.corrected = self.as_received or a, told.gradients
        return against(told.gradients, self.arms.replay)

    def _clamped(self, a: Sequence[AgainstReplay]) -> Corrected | None:
        """Without what clips by value took away too early."""
        arms = self.arms
        if not isinstance(self.clip, ValueClip):
            return None
        addends = Addends.of(arms.replayed(keep=True), self.gradients[0])
        if addends is None:
            return None
        return clamped(arms.u, self.clip, addends, self.seen, self.gradients, a, arms.names)

    def _low_sums(self, a: Sequence[AgainstReplay]) -> Corrected | None:
        """Without what sums in a low dtype lose, where the loop takes them."""
        if all(one.within for one in a):
            return None
        kept = self.arms.replayed(keep=True)
        return low_sums(self.arms.u, self.gradients, kept, self.seen)

    def _compared(
        self, a: Sequence[AgainstReplay], always_oracle: bool
    ) -> tuple[AgainstOracle | None, tuple[TensorRow, ...]]:
        arms, gradients = self.arms, self.gradients
        acquitted = all(one.within for one in a)
        vanishing = any(norm(e) == 0 for e in arms.replay.expected)
        right = not acquitted and reproduced(gradients, arms.replay, arms.case.plan.D)
        c = sums = weights = None
        if not acquitted or vanishing or always_oracle or arms.drew:
            c = self._against_oracle(full_floor=not (acquitted or right))
        if right and c is not None:
            sums = sources.in_sums(arms, gradients[0], a, c)
        as_one = None if acquitted or c is None else together(arms, gradients, c)
        if not acquitted and sums is None and as_one is None:
            weights = self._weights(a)
        if as_one is not None:
            states = states_together(as_one, decides(a, arms.replay, c, None, arms.case.precision))
            self.notes += together_note(as_one)
            self.diagnoses += gathered(arms.u, arms.names, as_one, self.seen)
        elif sums is None:
            states = decides(a, arms.replay, c, weights, arms.case.precision)
            if c is not None:
                states = beside_cut(arms, gradients, states, a, c)
            self.notes += rounding_note(arms.u, states)
        else:
            states = ["equal" if one.within else "rounding" for one in a]
        if c is not None:
            states = self._without_vanished(states, c)
            if as_one is None or not as_one.whole:
                self.findings += self._split(c, a, sums)
            if c.drew:
                self.diagnoses += repeated(arms.u, arms.microbatches, arms.microbatches_before)
            if self.explained is not None and self.explained.within:
                left = undecided(states, a, c)
                self.findings += undecided_finding(arms.u, arms.names, a, left)
        self.findings += gradient_findings(arms.u, arms.names, states, a, weights)
        if "differs" in states and as_one is None:  # else it is not made of the microbatches'
            self.weighed = weighed(arms, self.seen, gradients, a, weights)
            told = by_example(arms, gradients[0]) if self.weighed.left else None
            if told is not None:
                self.example_weights = told.rows
                self.notes.append(told.note)
        self._losses(c)
        return c, self._rows(states, a, c, sums)

    def _rows(
        self,
        states: Sequence[str],
        a: Sequence[AgainstReplay],
        c: AgainstOracle | None,
        sums: LoopSums | None,
    ) -> tuple[TensorRow, ...]:
        arms, gradients = self.arms, self.gradients
        if self.as_received is not None:  # what was taken out for others to be seen was there
            a, gradients = self.as_received, self.received
            states = [s if one.within else "differs" for s, one in zip(states, a, strict=True)]
        rows = [
            tensor_row(arms.u, t, arms.names[t], states[t], gradients[one.rank][t], one, c)
            for t, one in enumerate(a)
        ]
        if self.explained is not None:
            rows = isolated(rows, self.explained)
        if sums is not None:
            rows = [replace(row, exact_distance=d) for row, d in zip(rows, sums.left, strict=True)]
        return tuple(rows)

    def _split(
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

    def _against_oracle(self, full_floor: bool) -> AgainstOracle:
        arms = self.arms
        if not arms.group.counted:
            arms.oracle.check()
        return against_oracle(
            self.gradients,
            arms.replay,
            arms.split,
            arms.oracle,
            arms.large,
            arms.case.precision,
            full_floor,
        )

    def _weights(self, a: Sequence[AgainstReplay]) -> Weights:
        """Contribution weights on the rank that is furthest from the replay."""
        replay = self.arms.replay
        kept = self.arms.replayed(keep=True)
        worst = self.gradients[max(a, key=lambda one: over(one.distance, one.tolerance)).rank]
        weights = fit(kept.parts, replay.expected, worst, replay.scale)
        self.weights = tuple(
            (self.arms.u, r, k, 1.0, weight, weights.sigma[r, k])
            for (r, k), weight in sorted(weights.found.items())
        )
        return weights

    def _without_vanished(self, states: Sequence[str], c: AgainstOracle) -> list[str]:
        """Gradients that are all zeros where the oracle's are not were not compared."""
        arms, gradients = self.arms, self.gradients
        gone = [
            t
            for t, state in enumerate(states)
            if state == "equal" and not c.null[t] and vanished(gradients, arms.oracle.gradients, t)
        ]
        names = [arms.names[t] for t in gone]
        self.notes += vanished_note(arms.u, names, arms.case.precision.name)
        return ["not judged" if t in gone else state for t, state in enumerate(states)]

    def _losses(self, c: AgainstOracle | None) -> None:
        arms = self.arms
        if c is not None and c.split_failures and not (arms.replay.shared and c.repeatable):
            return  # other random numbers or another cut, another loss: no evidence
        values = beside.Losses(
            found=self._loss,
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

    @cached_property
    def _loss(self) -> float | None:
        return beside.candidate_loss(self.seen, self.arms.replay, self.arms.counts)

    def _row(self, oracle: Whole | None) -> UpdateRow:
        return update_row(
            self.arms.group,
            self.seen[0],
            self.gradients[0],
            self.arms.replay,
            supervised=sum(self.arms.counts.values()),
            loss=self._loss,
            oracle_loss=None if oracle is None else oracle.loss,
        )
