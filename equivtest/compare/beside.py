"""What an update is judged on beside its gradient: skips, buffers, losses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivtest.arms.replay import Replay
from equivtest.compare.cause import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.tolerance import oracle_tolerance, sum_tolerance
from equivtest.compare.verdict import Finding
from equivtest.distance import distance, norm, ratio
from equivtest.observe.trace import OptimizerTrace, UpdateTrace
from equivtest.precision import Precision


@dataclass(frozen=True)
class Skips:
    """What overflow makes of an update.

    Attributes:
        names: parameters whose gradient is not judged, because it is not finite.
        findings, notes: what was wrong about it, and what is worth saying.
    """

    names: frozenset[str]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def skips(
    u: int,
    seen: Sequence[UpdateTrace],
    replay_finite: Mapping[str, bool],
    candidate_finite: Mapping[str, bool],
    precision: str,
) -> Skips:
    """Whether each optimizer was skipped in update ``u`` where it had to be, on every rank.

    A scaler skips optimizer by optimizer: one may overflow beside another that does not.

    Args:
        seen: the update by rank.
        replay_finite, candidate_finite: by parameter, no element of its gradient is NaN or inf (on
            any rank).
    """
    names: set[str] = set()
    findings: list[Finding] = []
    notes: list[str] = []
    for optimizer in seen[0].optimizers:
        own = optimizer.names & replay_finite.keys()
        replayed = all(replay_finite[n] for n in own)
        found = all(candidate_finite[n] for n in own)
        applied = [
            other.applied
            for update in seen
            for other in update.optimizers
            if other.names == optimizer.names
        ]
        if not found:
            names |= own
        findings += [
            Finding(cause, text, update=u)
            for cause, text in _skip_findings(u, applied, replayed, found)
        ]
        if not (replayed or found or any(applied)):
            notes.append(
                f"update {u} of {optimizer.kind.__name__} was skipped: its gradient overflows in "
                f"{precision} at loss scale {seen[0].scale or 1:g}, in the replay as well; it is "
                "not judged"
            )
    before, after = seen[0].scale, seen[0].scale_after
    if notes and before is not None and after is not None and after >= before:
        text = f"the loss scale did not fall after update {u} was skipped"
        findings.append(Finding(Cause.SKIP, text, update=u))
    return Skips(frozenset(names), tuple(findings), tuple(notes))


def by_itself(findings: Sequence[Finding], oracle_finite: Callable[[], bool]) -> Iterator[Finding]:
    """The findings, without a cause where the float64 large batch is not finite either.

    Then the experiment diverges from the parameters that the update starts from, whatever the loop.
    """
    for finding in findings:
        if finding.cause != Cause.NONFINITE or oracle_finite():
            yield finding
        else:
            text = f"{finding.text}, and the float64 large batch's is not either: {_DIVERGES}"
            yield replace(finding, cause="", text=text)


_DIVERGES = "from the parameters that the update starts from the experiment itself diverges"


def _skip_findings(
    u: int, applied: Sequence[bool], replay_finite: bool, candidate_finite: bool
) -> Iterator[tuple[Cause, str]]:
    if len(set(applied)) > 1:
        who = [rank for rank, a in enumerate(applied) if not a]
        yield Cause.SKIP, f"ranks {who} skipped update {u} and the others applied it"
    if not candidate_finite and any(applied):
        yield Cause.NONFINITE, f"update {u} was applied with a gradient that is not finite"
    elif not candidate_finite and replay_finite:
        yield (
            Cause.GRADIENT,
            f"the gradient of update {u} is not finite, and that of the plan's microbatches is",
        )
    elif candidate_finite and replay_finite and not applied[0]:
        yield Cause.SKIP, f"update {u} was skipped although its gradient is finite"


def untouched(u: int, update: UpdateTrace, seen: OptimizerTrace) -> Iterator[Finding]:
    """A skipped update moves neither parameters nor state.

    A fused optimizer is called and skips inside: state that it makes then holds nothing but zeros.
    """
    moved = [
        n for n in sorted(seen.names) if not same_values(update.after.get(n), update.before.get(n))
    ]
    state = [
        n
        for n, entries in seen.state_after.items()
        for key, value in entries.items()
        if not same_values(value, seen.state_before.get(n, {}).get(key))
        and not (key not in seen.state_before.get(n, {}) and _nothing(value))
    ]
    if moved or state:
        yield Finding(
            Cause.SKIP,
            f"update {u} was skipped, yet {(moved or state)[0]!r} moved",
            update=u,
            tensor=(moved or state)[0],
        )


def _nothing(value: Any) -> bool:
    """A zero, or a tensor of zeros."""
    if isinstance(value, Tensor):
        return not bool(torch.count_nonzero(value))
    return bool(value == 0)


def buffers(u: int, replay: Replay, seen: Sequence[UpdateTrace], A: int) -> Iterator[Finding]:
    """Each rank's buffers after the update's last forward against those predicted for it."""
    for rank, (update, predicted) in enumerate(zip(seen, replay.buffers, strict=True)):
        for name, found in update.end.buffers.items():
            wanted = predicted.get(name)
            if wanted is None or same_values(found, wanted):
                continue
            moved = ratio(distance(found, wanted), norm(wanted))
            floating = found.is_floating_point()
            allowed = sum_tolerance(A, found.dtype) if floating else 0.0
            if moved > allowed:
                yield Finding(
                    Cause.BUFFERS,
                    f"buffer {name!r} of rank {rank} is {moved:.3g} of its norm away from what "
                    f"its forwards and broadcasts give in update {u}",
                    update=u,
                    rank=rank,
                    tensor=name,
                    distance=moved,
                    tolerance=allowed,
                )
                break


def candidate_loss(
    seen: Sequence[UpdateTrace], replay: Replay, counts: Mapping[str, float]
) -> float | None:
    """The candidate's normalised loss, where its losses are those that the replay made."""
    total = 0.0
    if not all(update.observed for update in seen):
        return None
    for rank, update in enumerate(seen):
        for k, microbatch in enumerate(update.microbatches):
            terms = replay.terms.get((rank, k))
            if terms is None or replay.counts[rank, k] != microbatch.counts:
                return None
            total += sum(
                value / counts[term]
                for value, term in zip(microbatch.totals, terms, strict=True)
                if term is not None
            )
    return total


@dataclass(frozen=True)
class Losses:
    """Normalised losses of one update.

    Attributes:
        found: the candidate's, None where it could not be matched.
        replayed, scale: the replay's, and the sum of its microbatches' magnitudes.
        oracle, large: of the whole group in float64 and in the case's precision, where they were
            computed.
        nudged: the large batch's with parameters moved in their last bits: in float64 the large
            batch is the oracle, and its distance from it no measure of noise.
        split_right: the split is right, so that the oracle's is what the candidate's should be.
    """

    found: float | None
    replayed: float
    scale: float
    oracle: float | None = None
    large: float | None = None
    nudged: Sequence[float] = ()
    split_right: bool = True


def losses(u: int, values: Losses, precision: Precision) -> tuple[list[Finding], list[str]]:
    """``|L - L_o| <= kappa max(f_L, c u) sum |L_i|``: what is beyond it, and what was left out."""
    if values.found is None:
        text = "the loop's own losses could not be matched with the experiment's: not compared"
        return [], [text]
    floor, wanted, notes = 0.0, [("the replay's", values.replayed)], []
    if values.oracle is not None and values.large is not None:
        moved = [abs(values.large - values.oracle), *(abs(n - values.large) for n in values.nudged)]
        noise = ratio(max(moved), values.scale)
        if noise <= precision.cap:
            floor = noise
            if values.split_right:
                wanted.append(("the oracle's", values.oracle))
        elif values.split_right:
            notes.append(
                f"update {u}: the loss of the large batch is noise in {precision.name}: the loss "
                "is not compared with the oracle's"
            )
    allowed = oracle_tolerance(precision, floor)
    for whose, value in wanted:
        off = ratio(abs(values.found - value), values.scale)
        if off > allowed:
            text = (
                f"the loss of update {u} is {values.found:.6g} and {whose} {value:.6g}: "
                f"{off:.3g} of its scale, allowed {allowed:.3g}"
            )
            found = Finding(Cause.LOSS, text, update=u, distance=off, tolerance=allowed)
            return [found], notes
    return [], notes
