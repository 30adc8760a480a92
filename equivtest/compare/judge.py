"""From traces to a verdict: runs the reference arms beside each update and decides.

Runs in the process of the reference arms, so that only the verdict travels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from equivtest.arms.build import deterministic
from equivtest.arms.case import Case
from equivtest.arms.reference import Reference
from equivtest.arms.replay import Replay, Start
from equivtest.compare import planned
from equivtest.compare.card import card_of, event_rows
from equivtest.compare.cause import Cause
from equivtest.compare.continuity import agreement, continuity, same_values
from equivtest.compare.distance import all_finite, distance, norm, ratio
from equivtest.compare.gradient import (
    AgainstOracle,
    AgainstReplay,
    against_oracle,
    against_replay,
    decides,
    smallest_weight_seen,
    vanished,
)
from equivtest.compare.parameters import ParameterJudge
from equivtest.compare.verdict import Finding, Status, TensorRow, UpdateRow, Verdict
from equivtest.compare.weights import Weights, fit
from equivtest.experiment import Experiment
from equivtest.observe.trace import Tensors, Trace, UpdateTrace
from equivtest.pool import Seat
from equivtest.precision import unit_roundoff

ORDER = (
    Cause.NOT_APPLIED,
    Cause.CLIP_MISSING,
    Cause.EXAMPLES,
    Cause.COUNTERS,
    Cause.SKIP,
    Cause.NONFINITE,
    Cause.STATE,
    Cause.HYPERPARAMETERS,
    Cause.GRADIENT,
    Cause.CLIP,
    Cause.RANKS,
    Cause.PARAMETERS,
    Cause.BUFFERS,
    Cause.LOSS,
)
"""Findings that tell most come first: a later one is often a consequence of an earlier."""


def judge(seat: Seat, experiment: Experiment, case: Case, traces: Sequence[Trace]) -> Verdict:
    """Compare the candidate's traces with the reference arms."""
    with deterministic():
        return _Judge(Reference(seat.cache, experiment, case), experiment, case, traces).verdict()


@dataclass
class _Judge:
    reference: Reference
    experiment: Experiment
    case: Case
    traces: Sequence[Trace]
    findings: list[Finding] = field(default_factory=list)
    rows: list[TensorRow] = field(default_factory=list)
    updates: list[UpdateRow] = field(default_factory=list)
    weights: list[tuple[int, int, int, float, float, float]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dtypes: frozenset[str] = frozenset()
    shapes: set[Any] = field(default_factory=set)
    oracles: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    seen_weight: float | None = None

    def verdict(self) -> Verdict:
        agreed, said = agreement(self.traces)
        self.findings += agreed
        for trace in self.traces:
            self.findings += continuity(trace, self._initial())
            self.findings += planned.counters(self.case, trace)
            self.findings += planned.examples(self.case, trace)
        parameters = ParameterJudge(self.experiment, self.case, self.traces[0], self.reference)
        for u in range(min([len(self.case.groups), *(len(t.updates) for t in self.traces)])):
            self._update(u)
            self.findings += parameters.judge(u, self.oracles.get(u))
        self.findings += parameters.finish()
        self.notes += parameters.notes
        for trace in self.traces:
            self.findings += planned.precision_applied(self.case, trace, self.dtypes)
        findings = _telling(self.findings)
        return Verdict(
            status=self._status(findings),
            card=card_of(self.experiment, self.case, self.traces, self.rows, self.seen_weight),
            findings=findings,
            notes=tuple(dict.fromkeys(self.notes)),
            rows=tuple(parameters.measured(row) for row in self.rows),
            updates=tuple(self.updates),
            weight_rows=tuple(self.weights),
            ranks=said,
            events=event_rows(self.traces),
        )

    def _initial(self) -> Tensors:
        """What ``model()`` gives; if the candidate began elsewhere, make sure it gives it twice."""
        initial = self.reference.initial().parameters
        for trace in self.traces:
            if not trace.updates:
                continue
            start = trace.updates[0].start.parameters
            if any(n in start and not same_values(start[n], initial[n]) for n in initial):
                self.reference.check_repeatable()
        return initial

    def _update(self, u: int) -> None:
        group, seen = self.case.groups[u], [t.updates[u] for t in self.traces]
        start = self._start(u)
        scale = seen[0].scale or 1.0
        replay = self.reference.replay(group, start, self.traces, u, scale)
        self.dtypes |= replay.dtypes
        self._buffers(u, replay, seen)
        names = self.reference.bench.names
        gradients = [[update.gradient.get(name) for name in names] for update in seen]
        finite = all_finite(replay.expected)
        if not self._skipped(u, seen, finite, all(all_finite(g) for g in gradients)):
            self._gradient(u, seen, gradients, replay, start)
        else:
            self._update_row(u, seen[0], replay, None, gradients[0])

    def _start(self, u: int) -> Start:
        """The candidate's own state before the group, buffers as before its first broadcast."""
        firsts = [t.updates[u] for t in self.traces]
        if u == 0:
            buffers = tuple(self.reference.initial().buffers for _ in firsts)
        else:
            buffers = tuple(t.updates[u - 1].end.buffers for t in self.traces)
        return Start(firsts[0].start.parameters, buffers)

    # -- the gradient

    def _gradient(
        self,
        u: int,
        seen: Sequence[UpdateTrace],
        gradients: list[list[Tensor | None]],
        replay: Replay,
        start: Start,
    ) -> None:
        a = against_replay(gradients, replay, self.case.plan)
        if self.seen_weight is None:
            self.seen_weight = smallest_weight_seen(a, replay)
        acquitted = all(one.within for one in a)
        c = weights = None
        shape = self.case.groups[u].shape
        vanishing = any(norm(e) == 0 for e in replay.expected)
        if not acquitted or vanishing or shape not in self.shapes:
            self.shapes.add(shape)
            c = self._oracle(u, gradients, replay, start, seen, full_floor=not acquitted)
        if not acquitted:
            weights = self._weights(u, a, gradients, replay, start, seen)
        states = decides(a, replay, c, weights)
        if c is not None:
            states = self._not_vanished(u, states, gradients, start, c)
        self._tensor_rows(u, states, a, c, gradients)
        self._gradient_findings(u, states, a, c, weights)
        self._losses(u, seen, replay, c, start)
        self._update_row(u, seen[0], replay, start if c is not None else None, gradients[0])

    def _oracle(
        self,
        u: int,
        gradients: list[list[Tensor | None]],
        replay: Replay,
        start: Start,
        seen: Sequence[UpdateTrace],
        full_floor: bool,
    ) -> AgainstOracle:
        group = self.case.groups[u]
        oracle = self.reference.oracle(group, start)
        self.oracles[u] = dict(zip(self.reference.bench.names, oracle.gradients, strict=True))
        oracle.loss  # noqa: B018  checks the counts before anything rests on them
        c = against_oracle(
            gradients,
            replay,
            self.reference.replay64(group, start),
            oracle,
            self.reference.large(group, start, seen[0].scale or 1.0),
            self.case.precision,
            full_floor,
        )
        self._split_findings(u, c)
        return c

    def _weights(
        self,
        u: int,
        a: Sequence[AgainstReplay],
        gradients: list[list[Tensor | None]],
        replay: Replay,
        start: Start,
        seen: Sequence[UpdateTrace],
    ) -> Weights:
        """Contribution weights on the rank that is furthest from the replay."""
        kept = self.reference.replay(
            self.case.groups[u], start, self.traces, u, seen[0].scale or 1.0, keep=True
        )
        worst = max(a, key=lambda one: _over(one.distance, one.tolerance)).rank
        dtypes = [g.dtype for g in gradients[worst] if g is not None]
        u_gradient = max((unit_roundoff(d) for d in dtypes), default=2.0**-53)
        found = fit(kept.parts, replay.expected, gradients[worst], replay.scale, u_gradient)
        self.weights += [
            (u, r, k, 1.0, weight, found.sigma[r, k])
            for (r, k), weight in sorted(found.found.items())
        ]
        return found

    def _not_vanished(
        self,
        u: int,
        states: list[str],
        gradients: list[list[Tensor | None]],
        start: Start,
        c: AgainstOracle,
    ) -> list[str]:
        truth = self.reference.oracle(self.case.groups[u], start).gradients
        gone = [
            t
            for t, state in enumerate(states)
            if state == "equal" and not c.null[t] and vanished(gradients, truth, t)
        ]
        if gone:
            name = self.reference.bench.names[gone[0]]
            self.notes.append(
                f"update {u}: {len(gone)} gradients are all zeros where the oracle's are not "
                f"({name} first): they vanish in {self.case.precision.name}, not judged"
            )
        return ["not judged" if t in gone else state for t, state in enumerate(states)]

    def _tensor_rows(
        self,
        u: int,
        states: Sequence[str],
        a: Sequence[AgainstReplay],
        c: AgainstOracle | None,
        gradients: list[list[Tensor | None]],
    ) -> None:
        for t, name in enumerate(self.reference.bench.names):
            held = gradients[a[t].rank][t]
            self.rows.append(
                TensorRow(
                    update=u,
                    tensor=name,
                    shape=tuple(held.shape) if held is not None else (),
                    dtype=str(held.dtype)[6:] if held is not None else "none",
                    state=states[t],
                    replay_distance=a[t].distance,
                    replay_tolerance=a[t].tolerance,
                    split_distance=None if c is None else c.split[t],
                    split_tolerance=None if c is None else c.split_tolerances[t],
                    oracle_distance=None if c is None else c.oracle[t],
                    oracle_tolerance=None if c is None else c.oracle_tolerances[t],
                    noise_floor=None if c is None else c.floor[t],
                    norm=norm(held),
                    scale=None if c is None else c.scale[t],
                    null=c is not None and c.null[t],
                    blind=c is not None and (c.blind[t] or c.capped[t]),
                    worst_rank=a[t].rank,
                )
            )

    def _gradient_findings(
        self,
        u: int,
        states: Sequence[str],
        a: Sequence[AgainstReplay],
        c: AgainstOracle | None,
        weights: Weights | None,
    ) -> None:
        odd = [t for t, state in enumerate(states) if state == "differs"]
        rounding = [t for t, state in enumerate(states) if state == "rounding"]
        names = self.reference.bench.names
        if rounding:
            self.notes.append(
                f"update {u}: {len(rounding)} gradients are beyond the replay's tolerance and "
                "within the oracle's: rounding of another forward"
            )
        if not odd:
            return
        worst = max(odd, key=lambda t: _over(a[t].distance, a[t].tolerance))
        one = a[worst]
        if one.missing:
            text = (
                f"gradient of {names[worst]!r} is None on one side and a tensor on the other in "
                f"update {u} (None also keeps weight decay and optimizer state away)"
            )
        else:
            text = (
                f"gradient of {names[worst]!r} is {one.distance:.3g} of its scale away from the "
                f"plan's in update {u}, allowed {one.tolerance:.3g} ({len(odd)} of {len(a)} "
                f"tensors){_told(weights, one.tolerance)}"
            )
        self.findings.append(
            Finding(
                Cause.GRADIENT,
                text,
                update=u,
                rank=one.rank,
                tensor=names[worst],
                distance=one.distance,
                tolerance=one.tolerance,
            )
        )

    def _split_findings(self, u: int, c: AgainstOracle) -> None:
        failing = c.split_failures
        if not failing:
            return
        worst = max(failing, key=lambda t: c.split[t] / c.split_tolerances[t])
        why = (
            "the forward draws random numbers"
            if c.drew
            else "examples see each other in the model or the loss"
            if c.coupled
            else "something in the model, the loss or collate depends on how the batch is cut"
        )
        self.findings.append(
            Finding(
                "",
                f"in float64, without any loop, the split gradient of "
                f"{self.reference.bench.names[worst]!r} is {c.split[worst]:.3g} of its scale away "
                f"from the large batch's in update {u}, allowed {c.split_tolerances[worst]:.3g} "
                f"({len(failing)} of {len(c.split)} tensors): {why}",
                update=u,
                tensor=self.reference.bench.names[worst],
                distance=c.split[worst],
                tolerance=c.split_tolerances[worst],
            )
        )

    # -- beside the gradient

    def _skipped(
        self, u: int, seen: Sequence[UpdateTrace], finite: bool, candidate_finite: bool
    ) -> bool:
        """Whether the update has no gradient to judge, because it overflowed as it had to."""
        applied = [update.applied for update in seen]
        if len(set(applied)) > 1:
            who = [r for r, a in enumerate(applied) if not a]
            self._find(Cause.SKIP, f"ranks {who} skipped update {u} and the others applied it", u)
        if finite and candidate_finite:
            if not applied[0]:
                self._find(Cause.SKIP, f"update {u} was skipped although its gradient is finite", u)
            return False
        if not candidate_finite and any(applied):
            self._find(
                Cause.NONFINITE, f"update {u} was applied with a gradient that is not finite", u
            )
            return True
        if finite:
            self._find(
                Cause.GRADIENT,
                f"the gradient of update {u} is not finite, and that of the plan's microbatches is",
                u,
            )
            return True
        if candidate_finite:
            return False
        self.notes.append(
            f"update {u} was skipped: its gradient overflows in {self.case.precision.name} at loss "
            f"scale {seen[0].scale or 1:g}, in the replay as well; it is not judged"
        )
        before, after = seen[0].scale, seen[0].scale_after
        if before is not None and after is not None and after >= before:
            self._find(Cause.SKIP, f"the loss scale did not fall after update {u} was skipped", u)
        return True

    def _buffers(self, u: int, replay: Replay, seen: Sequence[UpdateTrace]) -> None:
        for r, update in enumerate(seen):
            predicted = replay.buffers[r]
            for name, found in update.end.buffers.items():
                wanted = predicted.get(name)
                if wanted is None or same_values(found, wanted):
                    continue
                moved = ratio(distance(found, wanted), norm(wanted))
                allowed = (
                    4 * math.sqrt(self.case.plan.A) * unit_roundoff(found.dtype)
                    if found.is_floating_point()
                    else 0.0
                )
                if moved > allowed:
                    self.findings.append(
                        Finding(
                            Cause.BUFFERS,
                            f"buffer {name!r} of rank {r} is {moved:.3g} of its norm away from "
                            f"what its forwards and broadcasts give in update {u}",
                            update=u,
                            rank=r,
                            tensor=name,
                            distance=moved,
                            tolerance=allowed,
                        )
                    )
                    break

    def _losses(
        self,
        u: int,
        seen: Sequence[UpdateTrace],
        replay: Replay,
        c: AgainstOracle | None,
        start: Start,
    ) -> None:
        found = _loss(seen, replay, self.reference.total(self.case.groups[u]))
        if found is None:
            self.notes.append(
                "the loop's own losses could not be matched with the experiment's: not compared"
            )
            return
        precision = self.case.precision
        floor, oracle_loss = 0.0, None
        if c is not None:
            group = self.case.groups[u]
            oracle_loss = self.reference.oracle(group, start).loss
            large = self.reference.large(group, start, seen[0].scale or 1.0).loss
            floor = ratio(abs(large - oracle_loss), replay.loss_sum)
            if not floor <= precision.cap:
                floor, oracle_loss = 0.0, None
                if not c.split_failures:
                    self.notes.append(
                        f"update {u}: the loss of the large batch is noise in {precision.name}: "
                        "the loss is not compared with the oracle's"
                    )
        allowed = precision.kappa * max(floor, precision.c * precision.u)
        wanted = [("the replay's", replay.loss)]
        if oracle_loss is not None and c is not None and not c.split_failures:
            wanted.append(("the oracle's", oracle_loss))
        for whose, value in wanted:
            off = ratio(abs(found - value), replay.loss_sum)
            if off > allowed:
                self.findings.append(
                    Finding(
                        Cause.LOSS,
                        f"the loss of update {u} is {found:.6g} and {whose} {value:.6g}: "
                        f"{off:.3g} of its scale, allowed {allowed:.3g}",
                        update=u,
                        distance=off,
                        tolerance=allowed,
                    )
                )
                return

    def _update_row(
        self,
        u: int,
        update: UpdateTrace,
        replay: Replay,
        start: Start | None,
        gradient: list[Tensor | None],
    ) -> None:
        group = self.case.groups[u]
        lr = update.optimizers[0].groups[0][1].get("lr") if update.optimizers else None
        squared = sum(norm(g) ** 2 for g in gradient)
        self.updates.append(
            UpdateRow(
                update=u,
                epoch=group.epoch,
                examples=len(group.flat),
                supervised=sum(self.reference.total(group).values()),
                applied=update.applied,
                loss=_loss(
                    [t.updates[u] for t in self.traces], replay, self.reference.total(group)
                ),
                oracle_loss=None if start is None else self.reference.oracle(group, start).loss,
                lr=None if lr is None else float(lr),
                loss_scale=update.scale,
                grad_norm=math.sqrt(squared) if math.isfinite(squared) else None,
                clipped=bool(update.clip_bounds),
                peak_bytes=max((m.peak_bytes for m in update.microbatches), default=None),
                replay_bits_equal=all(
                    same_values(g, e) for g, e in zip(gradient, replay.reduced, strict=True)
                ),
            )
        )

    def _find(self, cause: Cause, text: str, u: int) -> None:
        self.findings.append(Finding(cause, text, update=u))

    def _status(self, findings: Sequence[Finding]) -> Status:
        if any(f.cause for f in findings):
            return Status.FAULT
        if findings:
            return Status.UNEXPLAINED
        if not any(row.state in ("equal", "rounding") for row in self.rows):
            return Status.INCONCLUSIVE
        return Status.EQUIVALENT


def _telling(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Findings in the order of what they tell, without mere consequences of others."""
    causes = {f.cause for f in findings}
    consequences: set[str] = set()
    if Cause.NOT_APPLIED in causes:  # another forward: other gradients and losses
        consequences |= {Cause.GRADIENT, Cause.LOSS, Cause.BUFFERS}
    if Cause.HYPERPARAMETERS in causes:
        consequences |= {Cause.PARAMETERS}
    order = {cause: k for k, cause in enumerate(ORDER)}
    kept: dict[tuple[object, ...], Finding] = {}
    for f in findings:  # the same on several ranks is said once
        if f.cause not in consequences:
            kept.setdefault((f.cause, f.update, f.tensor), f)
    return tuple(
        sorted(kept.values(), key=lambda f: (order.get(f.cause, len(order)), f.update or 0))  # type: ignore[call-overload]
    )


def _loss(seen: Sequence[UpdateTrace], replay: Replay, counts: dict[str, float]) -> float | None:
    """The candidate's normalised loss, where its losses are those that the replay made."""
    total = 0.0
    for r, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            terms = replay.terms.get((r, k))
            if terms is None or replay.counts[r, k] != microbatch.counts:
                return None
            total += sum(
                value / counts[term]
                for value, term in zip(microbatch.totals, terms, strict=True)
                if term is not None
            )
    return total


def _told(weights: Weights | None, tolerance: float) -> str:
    """What the weights say, in a clause."""
    if weights is None or not weights.differ():
        return ""
    r, k = max(weights.differ(), key=lambda key: abs(weights.found[key] - 1))
    return (
        f"; microbatch {k} of replica {r} counts {weights.found[r, k]:.6g} times what the plan "
        f"gives it ({len(weights.differ())} of {len(weights.found)} weights differ)"
    )


def _over(distance: float, tolerance: float) -> float:
    return distance / tolerance if tolerance > 0 else math.inf
