"""Whether an update was skipped where its gradient overflows, and left everything alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.verdict import About, Finding
from equivtest.observe.trace import OptimizerTrace, Trace, UpdateTrace


@dataclass(frozen=True)
class Skips:
    """What overflow makes of an update.

    Attributes:
        names: parameters whose gradient is not judged, because it is not finite.
        findings: what was wrong about it.
        optimizers: those that were skipped and had to be, as rank 0 saw them; ``applied``, those
            that were applied with a finite gradient.
    """

    names: frozenset[str]
    findings: tuple[Finding, ...]
    optimizers: tuple[OptimizerTrace, ...]
    applied: tuple[OptimizerTrace, ...]


def skips(
    u: int,
    seen: Sequence[UpdateTrace],
    replay_finite: Mapping[str, bool],
    candidate_finite: Mapping[str, bool],
    overflowed: Collection[str],
) -> Skips:
    """Whether each optimizer was skipped in update ``u`` where it had to be, on every rank.

    A scaler skips optimizer by optimizer: one may overflow beside another that does not.

    Args:
        seen: the update by rank.
        replay_finite, candidate_finite: by parameter, no element of its gradient is NaN or inf (on
            any rank).
        overflowed: parameters that have such a gradient in some microbatch of the candidate, for it
            shares the replay's bits.
    """
    names: set[str] = set()
    findings: list[Finding] = []
    skipped: list[OptimizerTrace] = []
    moved_on: list[OptimizerTrace] = []
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
        replaced = sorted(own.intersection(overflowed)) if found else []
        if not found or (replaced and any(applied)):
            names |= own
        findings += [
            Finding(cause, text, update=u)
            for cause, text in _skip_findings(u, applied, replayed, found, replaced)
        ]
        if not (replayed or found or any(applied)):
            skipped.append(optimizer)
        if replayed and found and all(applied):
            moved_on.append(optimizer)
    before, after = seen[0].scale, seen[0].scale_after
    if skipped and before is not None and after is not None and after >= before:
        text = f"the loss scale did not fall after update {u} was skipped"
        findings.append(Finding(Cause.SKIP, text, update=u))
    return Skips(frozenset(names), tuple(findings), tuple(skipped), tuple(moved_on))


def by_itself(findings: Sequence[Finding], oracle_finite: Callable[[], bool]) -> Iterator[Finding]:
    """The findings, without a cause where the float64 large batch is not finite either.

    Then the experiment diverges from the parameters that the update starts from, whatever the loop.
    """
    for finding in findings:
        if finding.cause != Cause.NONFINITE or oracle_finite():
            yield finding
        else:
            text = (
                f"{finding.text}, and the float64 large batch's is not either: from the parameters "
                "that the update starts from the experiment itself diverges"
            )
            yield replace(finding, cause="", text=text, about=About.DIVERGING)


def _skip_findings(
    u: int,
    applied: Sequence[bool],
    replay_finite: bool,
    candidate_finite: bool,
    replaced: Sequence[str],
) -> Iterator[tuple[Cause, str]]:
    if len(set(applied)) > 1:
        who = [rank for rank, a in enumerate(applied) if not a]
        yield (
            Cause.RANK_LOCAL_DECISION,
            f"ranks {who} skipped update {u} and the others applied it",
        )
    if not candidate_finite and any(applied):
        yield Cause.NONFINITE, f"update {u} was applied with a gradient that is not finite"
    elif not candidate_finite and replay_finite:
        yield (
            Cause.GRADIENT,
            f"the gradient of update {u} is not finite, and that of the plan's microbatches is",
        )
    elif candidate_finite and replay_finite and not applied[0]:
        yield Cause.SKIP, f"update {u} was skipped although its gradient is finite"
    elif replaced and any(applied):
        yield (
            Cause.UPDATE_ON_ZERO,
            f"update {u} was applied, and the gradient of {replaced[0]!r} overflows in a "
            "microbatch: the loop replaced what is not finite, where the update must be skipped",
        )


def untouched(u: int, update: UpdateTrace, seen: OptimizerTrace) -> Iterator[Finding]:
    """A skipped update moves neither parameters nor state.

    A fused optimizer is called and skips inside: state that it makes then holds nothing but zeros.
    """
    parameters, state = moved(update, seen)
    for name in (parameters or state)[:1]:
        text = f"update {u} was skipped, yet {name!r} moved"
        yield Finding(Cause.SKIP, text, update=u, tensor=name)


def never_applied(trace: Trace) -> Iterator[str]:
    """A note where every update was skipped: there is no gradient to judge the loop on."""
    attempts = [o for update in trace.updates for o in update.optimizers]
    if attempts and not any(o.applied for o in attempts):
        yield (
            f"all {len(trace.updates)} updates were skipped, and no gradient could "
            "be judged: start from a lower scale"
        )


def moved(update: UpdateTrace, seen: OptimizerTrace) -> tuple[list[str], list[str]]:
    """Names of the parameters that an update moved, and of those whose optimizer state it did."""
    parameters = [
        n for n in sorted(seen.names) if not same_values(update.after.get(n), update.before.get(n))
    ]
    state = [
        n
        for n, entries in seen.state_after.items()
        for key, value in entries.items()
        if not same_values(value, seen.state_before.get(n, {}).get(key))
        and not (key not in seen.state_before.get(n, {}) and _nothing(value))
    ]
    return parameters, state


def _nothing(value: Any) -> bool:
    """A zero, or a tensor of zeros."""
    if isinstance(value, Tensor):
        return not bool(torch.count_nonzero(value))
    return bool(value == 0)
