"""One update: the reference arms beside it, the comparisons, and what they find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from equivtest.arms.case import Case
from equivtest.arms.oracle import JITTERS, Whole
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Replay, Start
from equivtest.compare import beside
from equivtest.compare.cause import Cause
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
from equivtest.compare.norm_clip import NormClip
from equivtest.compare.rows import isolated, tensor_row, update_row
from equivtest.compare.skips import Skips, by_itself
from equivtest.compare.skips import skips as judge_skips
from equivtest.compare.telling import gradient_finding, over, split_finding, sums_finding
from equivtest.compare.value_clip import Clamped
from equivtest.compare.verdict import Finding, TensorRow, UpdateRow
from equivtest.compare.weights import Weights, fit
from equivtest.distance import MaybeTensors, finite, norm
from equivtest.isolate import scaler_skip
from equivtest.isolate.explained import Explained
from equivtest.isolate.explaining import explain
from equivtest.isolate.loop_sums import loop_sums
from equivtest.isolate.scaler_skip import Arms
from equivtest.isolate.sums import LoopSums, in_another_order, reproduced
from equivtest.observe.trace import MicrobatchTrace, Trace, UpdateTrace
from equivtest.plan import GroupLayout
from equivtest.precision import unit_roundoff


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


def judge_update(
    reference: Reference,
    case: Case,
    traces: Sequence[Trace],
    u: int,
    clip: Clip | None,
    always_oracle: bool,
    known_sources: frozenset[str] = frozenset(),
) -> Judged:
    """Judge update ``u`` of all ranks.

    Args:
        clip: the experiment's.
        always_oracle: run the oracle even where the loop is acquitted: for the first group of each
            shape.
        known_sources: of which the shares are known from an update before.
    """
    judge = _UpdateJudge(reference, case, traces, u, clip, known_sources)
    return judge.judge(always_oracle)


@dataclass
class _UpdateJudge:
    reference: Reference
    case: Case
    traces: Sequence[Trace]
    u: int
    clip: Clip | None
    known_sources: frozenset[str]
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    weights: tuple[tuple[int, int, int, float, float, float], ...] = ()
    explained: Explained | None = None
    skipped: Explained | None = None

    def judge(self, always_oracle: bool) -> Judged:
        self.findings += beside.buffers(self.u, self.replay, self.seen, self.case.plan.A)
        planned = self._finite([self.replay.expected])
        right = self._finite([self.replay.expected, *self._reduced_if_scaled()])
        overflowed = [n for n in self.names if self.replay.shared and not planned[n]]
        skips = judge_skips(self.u, self.seen, right, self._finite(self.gradients), overflowed)
        if self.u == 0 and not all(right.values()):
            self.oracle.check_finite()
        self.findings += by_itself(skips.findings, lambda: self.oracle.finite)
        self._overflows(skips)
        left_out = skips.names | self._unheld()
        a = self._against_replay(left_out, self.gradients, self.replay)
        if all(one.within for one in a):
            self._note_order()
        else:
            a = self._with_a_clip_by_hand(a, left_out)
        self._frozen()
        judged = not all(one.skipped for one in a)
        c, rows = self._compared(a, always_oracle) if judged else (None, ())
        return Judged(
            row=self._row(None if c is None else self.oracle.loss),
            rows=rows,
            findings=tuple(self.findings),
            notes=tuple(self.notes),
            weights=self.weights,
            oracle=None if c is None else dict(zip(self.names, self.oracle.gradients, strict=True)),
            smallest_weight_seen=smallest_weight_seen(a, self.replay) if judged else None,
            dtypes=self.replay.dtypes,
            seen=tuple(self.seen),
            explained=self.explained,
            skipped=self.skipped,
        )

    def _reduced_if_scaled(self) -> list[MaybeTensors]:
        """What a scaler looks at, where there is one: a sum may overflow in the case's dtype."""
        return [] if self.seen[0].scale is None else [self.replay.reduced]

    def _overflows(self, skips: Skips) -> None:
        """What was skipped, and whether the large batch would be; and the other way around."""
        arms = Arms(
            names=self.names,
            precision=self.case.precision,
            group=self.group,
            start=self.start,
            seen=self._microbatches,
            loss_scale=self.loss_scale,
            replay=self.replay,
            large=self._large_times,
            oracle=lambda: self.oracle,
        )
        history = self.traces[0].updates[: self.u + 1]
        found = scaler_skip.detect(arms, history, skips.optimizers, skips.applied)
        self.skipped = scaler_skip.explained(found, self.traces[0], self.case.isolate)
        unit = self.reference.scheduler_unit
        findings, notes = scaler_skip.told(found, self.traces[0], unit, self.case.isolate)
        self.findings += findings
        self.notes += notes

    def _large_times(self, factor: float) -> Whole:
        return self.reference.large(self.group, self.start, self.loss_scale * factor)

    def _against_replay(
        self, skipped: frozenset[str], gradients: Sequence[MaybeTensors], replay: Replay
    ) -> list[AgainstReplay]:
        found = against_replay(gradients, replay, self.case.plan)
        return [
            replace(one, skipped=name in skipped)
            for name, one in zip(self.names, found, strict=True)
        ]

    def _with_a_clip_by_hand(
        self, a: list[AgainstReplay], skipped: frozenset[str]
    ) -> list[AgainstReplay]:
        """Judge what the optimizer received instead, if that acquits and no clip was seen."""
        if self.clip is None or any(update.clip_bounds for update in self.seen):
            return a
        plan = dict(zip(self.names, self.replay.expected, strict=True))
        told = self.clip.received(self.seen[0], plan)
        if told is None:
            return a
        clipped = [[update.clipped.get(name) for name in self.names] for update in self.seen]
        instead = self._against_replay(skipped, clipped, told.as_clipped(self.replay))
        if not all(one.within for one in instead):
            return a
        if isinstance(told, Clamped):
            sizes = zip(self.names, instead, self.replay.scale, strict=True)
            allowed = {name: one.tolerance * scale for name, one, scale in sizes}
            if not all(told.holds(update.clipped, allowed) for update in self.seen):
                return a
        self.seen = [told.before_clip(update) for update in self.seen]
        self.notes += [f"update {self.u}: {told.note}"] if told.note else []
        return instead

    # -- what is compared

    @cached_property
    def group(self) -> GroupLayout:
        return self.case.groups[self.u]

    @cached_property
    def seen(self) -> list[UpdateTrace]:
        """The update by rank."""
        return [trace.updates[self.u] for trace in self.traces]

    @property
    def _microbatches(self) -> list[tuple[MicrobatchTrace, ...]]:
        """The update's by rank."""
        return [update.microbatches for update in self.seen]

    @property
    def _drew(self) -> bool:
        """A forward drew random numbers: what they changed here may be this update's alone."""
        return any(m.rng is not None for replica in self._microbatches for m in replica)

    @cached_property
    def names(self) -> list[str]:
        return self.reference.bench.names

    @property
    def gradients(self) -> list[list[Tensor | None]]:
        """The candidate's gradients by rank, in the order of ``names``."""
        return [[update.gradient.get(name) for name in self.names] for update in self.seen]

    @cached_property
    def start(self) -> Start:
        """The candidate's own state before the group, buffers as before its first broadcast."""
        initial = self.reference.initial().buffers
        buffers = [
            trace.updates[self.u - 1].end.buffers if self.u else initial for trace in self.traces
        ]
        return Start(self.seen[0].start.parameters, tuple(buffers))

    @cached_property
    def loss_scale(self) -> float:
        return self.seen[0].scale or 1.0

    @cached_property
    def replay(self) -> Replay:
        return self._replayed()

    @cached_property
    def oracle(self) -> Whole:
        return self.reference.oracle(self.group, self.start)

    @cached_property
    def large(self) -> Whole:
        return self._large_times(1.0)

    def _unheld(self) -> frozenset[str]:
        """Parameters that no optimizer holds: only a clip by norm makes use of their gradients."""
        held = {name for optimizer in self.seen[0].optimizers for name in optimizer.names}
        unheld = frozenset(self.names) - held
        if not unheld or isinstance(self.clip, NormClip):
            return frozenset()
        known = {n for groups in self.traces[0].groups_after for names, _ in groups for n in names}
        nobodys = sorted(unheld - known)  # others are of an optimizer that was not called
        if nobodys:
            self.notes.append(
                f"no optimizer holds {nobodys[0]!r} ({len(nobodys)}): not updated and not judged"
            )
        return unheld

    def _frozen(self) -> None:
        """A gradient on a parameter that the experiment freezes: it is trained, or clipped with."""
        extra = sorted(
            {n for update in self.seen for n, g in update.gradient.items() if g is not None}
            - set(self.names)
        )
        if extra:
            text = (
                f"{extra[0]!r} has a gradient in update {self.u} ({len(extra)} parameters), and "
                "the experiment's model freezes it"
            )
            self.findings.append(Finding(Cause.GRADIENT, text, update=self.u, tensor=extra[0]))

    def _finite(self, gradients: Sequence[MaybeTensors]) -> dict[str, bool]:
        """By parameter, whether its gradient is finite in all of ``gradients``."""
        by_rank = [finite(gradient) for gradient in gradients]
        return {name: all(r) for name, *r in zip(self.names, *by_rank, strict=True)}

    def _replayed(self, *, keep: bool = False, apart: bool = False) -> Replay:
        return self.reference.replay(
            self.group, self.start, self.traces, self.u, self.loss_scale, keep=keep, apart=apart
        )

    # -- the comparisons

    def _compared(
        self, a: Sequence[AgainstReplay], always_oracle: bool
    ) -> tuple[AgainstOracle | None, tuple[TensorRow, ...]]:
        acquitted = all(one.within for one in a)
        vanishing = any(norm(e) == 0 for e in self.replay.expected)
        right = not acquitted and reproduced(self.gradients, self.replay, self.case.plan.D)
        c = sums = weights = None
        if not acquitted or vanishing or always_oracle or self._drew:
            c = self._against_oracle(full_floor=not (acquitted or right))
        if right and c is not None:
            sums = self._loop_sums(a, c)
        if not acquitted and sums is None:
            weights = self._weights(a)
        if sums is None:
            states = decides(a, self.replay, c, weights, self.case.precision)
            self._note_rounding(states)
        else:
            states = ["equal" if one.within else "rounding" for one in a]
        if c is not None:
            states = self._without_vanished(states, c)
            self.findings += self._split(c, a, sums)
        self.findings += gradient_finding(self.u, self.names, states, a, weights)
        self._losses(c)
        gradients = self.gradients
        rows = [
            tensor_row(self.u, t, self.names[t], states[t], gradients[one.rank][t], one, c)
            for t, one in enumerate(a)
        ]
        if self.explained is not None:
            rows = isolated(rows, self.explained)
        if sums is not None:
            rows = [replace(row, exact_distance=d) for row, d in zip(rows, sums.left, strict=True)]
        return c, tuple(rows)

    def _loop_sums(self, a: Sequence[AgainstReplay], c: AgainstOracle) -> LoopSums | None:
        """What is beyond A and the rounding of a right loop's own sums."""
        comparable = not (c.split_failures or c.drew)
        return loop_sums(
            self.gradients[0],
            self._replayed(apart=True),
            self.large.gradients if comparable else None,
            [one.tolerance for one in a],
            self.case.precision,
            self.names,
        )

    def _split(
        self, c: AgainstOracle, a: Sequence[AgainstReplay], sums: LoopSums | None
    ) -> list[Finding]:
        """What comparison B found, or the loop's sums lose: sources explain it, or none does."""
        found = split_finding(self.u, self.names, c, self.group.shape)
        found += [] if sums is None else sums_finding(self.u, self.names, a)
        isolate = self.case.isolate
        wanted = isolate == "always" or (isolate == "auto" and bool(found))
        if not (wanted and c.repeatable and len(self.group.flat) > 1):
            return found
        scene = self.reference.scene(self.group, self.start, self._microbatches)
        self.explained = explain(
            scene, self.names, c.null, c.split_tolerances, sums, known=self.known_sources
        )
        self.notes += self.explained.notes
        return [*self.explained.findings] if self.explained.within else found

    def _against_oracle(self, full_floor: bool) -> AgainstOracle:
        self.oracle.check()
        return against_oracle(
            self.gradients,
            self.replay,
            self.reference.split(self.group, self.start, self._microbatches),
            self.oracle,
            self.large,
            self.case.precision,
            full_floor,
        )

    def _weights(self, a: Sequence[AgainstReplay]) -> Weights:
        """Contribution weights on the rank that is furthest from the replay."""
        kept = self._replayed(keep=True)
        worst = self.gradients[max(a, key=lambda one: over(one.distance, one.tolerance)).rank]
        u = max((unit_roundoff(g.dtype) for g in worst if g is not None), default=2.0**-53)
        weights = fit(kept.parts, self.replay.expected, worst, self.replay.scale, u)
        self.weights = tuple(
            (self.u, r, k, 1.0, weight, weights.sigma[r, k])
            for (r, k), weight in sorted(weights.found.items())
        )
        return weights

    def _without_vanished(self, states: list[str], c: AgainstOracle) -> list[str]:
        """Gradients that are all zeros where the oracle's are not were not compared."""
        gradients, truth = self.gradients, self.oracle.gradients
        gone = [
            t
            for t, state in enumerate(states)
            if state == "equal" and not c.null[t] and vanished(gradients, truth, t)
        ]
        if gone:
            self.notes.append(
                f"update {self.u}: {len(gone)} gradients are all zeros where the oracle's are not "
                f"({self.names[gone[0]]} first): they vanish in {self.case.precision.name}, not "
                "judged"
            )
        return ["not judged" if t in gone else state for t, state in enumerate(states)]

    def _note_rounding(self, states: Sequence[str]) -> None:
        rounding = sum(state == "rounding" for state in states)
        if rounding:
            self.notes.append(
                f"update {self.u}: {rounding} gradients are beyond the replay's tolerance and "
                "within the oracle's: rounding of another forward"
            )

    def _note_order(self) -> None:
        """A right loop whose sums are not the wrapper's own: said once, it hardly changes."""
        text = in_another_order(self.gradients[0], self.replay, self.names) if self.u == 0 else None
        self.notes += [text] if text else []

    def _losses(self, c: AgainstOracle | None) -> None:
        if c is not None and c.split_failures and not (self.replay.shared and c.repeatable):
            return  # other random numbers or another cut, another loss: no evidence
        values = beside.Losses(
            found=self._loss,
            replayed=self.replay.loss,
            scale=self.replay.loss_sum,
            oracle=None if c is None else self.oracle.loss,
            large=None if c is None else self.large.loss,
            # Of one microbatch, which no cut changes, the oracle draws numbers of its own.
            split_right=c is None or not (c.split_failures or c.drew or self._drew),
        )
        findings, notes = beside.losses(self.u, values, self.case.precision)
        if findings and c is not None:
            values = replace(values, nudged=[self.large.jittered_loss(k) for k in range(JITTERS)])
            findings, notes = beside.losses(self.u, values, self.case.precision)
        self.findings += findings
        self.notes += notes

    @cached_property
    def _loss(self) -> float | None:
        return beside.candidate_loss(self.seen, self.replay, self.reference.total(self.group))

    def _row(self, oracle_loss: float | None) -> UpdateRow:
        supervised = sum(self.reference.total(self.group).values())
        update, gradient = self.seen[0], self.gradients[0]
        return update_row(
            self.group, update, gradient, self.replay, supervised, self._loss, oracle_loss
        )
