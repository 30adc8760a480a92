"""Continuity: what an update starts from is what the one before ended with. Pure.

It comes first: every arm restarts from the candidate's own state, so a fault of state would
otherwise be invisible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.compare.verdict import About, Finding
from equivtest.distance import dense, distance, norm, ratio
from equivtest.observe.trace import COUNTER, ParamGroups, Tensors, Trace, UpdateTrace


def continuity(trace: Trace, initial: Tensors) -> Iterator[Finding]:
    """Everything that moved between or inside updates without being declared."""
    previous: UpdateTrace | None = None
    for u, update in enumerate(trace.updates):
        if previous is None:
            yield from _first(trace.rank, update, initial)
        else:
            yield from _between(trace.rank, u, previous, update)
        yield from _same(
            trace.rank, u, update.start.parameters, update.before, "during accumulation"
        )
        yield from _counters(trace.rank, u, update)
        previous = update
    if previous is not None:
        last = len(trace.updates) - 1
        yield from _same(
            trace.rank, last, previous.after, previous.end.parameters, "after the last update"
        )
        yield from _same(
            trace.rank, last, previous.averages, trace.averages_after, "after the last update"
        )
        for optimizer in previous.optimizers:
            left = trace.state_after.get(optimizer.names)
            if left is not None:
                yield from _same_state(
                    trace.rank, last, optimizer.state_after, left, "after the last update"
                )


def _first(rank: int, update: UpdateTrace, initial: Tensors) -> Iterator[Finding]:
    yield from _same(
        rank, 0, initial, update.start.parameters, "before the first update (from model() on)"
    )
    for optimizer in update.optimizers:
        held = sorted(name for name, state in optimizer.state_before.items() if state)
        counted = [n for n in held if count_of(optimizer.state_before[n]) not in (None, 0.0)]
        if counted:
            yield Finding(
                Cause.STATE,
                f"{optimizer.kind.__name__} has already counted updates of {counted[0]!r} when the "
                "first update begins",
                update=0,
                rank=rank,
                tensor=counted[0],
            )


def _between(rank: int, u: int, previous: UpdateTrace, update: UpdateTrace) -> Iterator[Finding]:
    when = f"between update {u - 1} and {u}"
    moved = _same(rank, u, previous.after, update.start.parameters, when)
    yield from (replace(one, about=About.BETWEEN_UPDATES) for one in moved)
    for optimizer in update.optimizers:
        before = next((o for o in previous.optimizers if o.names == optimizer.names), None)
        if before is not None:
            yield from _same_state(rank, u, before.state_after, optimizer.state_before, when)
    if previous.scale_after is not None and update.scale not in (None, previous.scale_after):
        yield Finding(
            Cause.STATE,
            f"the loss scale is {update.scale:g} at update {u}, and was {previous.scale_after:g} "
            f"after update {u - 1}",
            update=u,
            rank=rank,
        )


def _same(rank: int, u: int, expected: Tensors, found: Tensors, when: str) -> Iterator[Finding]:
    for name in sorted(expected.keys() | found.keys()):
        if name not in expected or name not in found:
            yield Finding(
                Cause.STATE,
                f"parameter {name!r} {'appeared' if name in found else 'disappeared'} {when}",
                update=u,
                rank=rank,
                tensor=name,
                about=About.PARAMETER,
            )
        elif not same_values(expected[name], found[name]):
            moved = _moved(rank, u, f"parameter {name!r}", name, expected[name], found[name], when)
            yield replace(moved, about=About.PARAMETER)


def _same_state(
    rank: int,
    u: int,
    expected: Mapping[str, Mapping[str, Any]],
    found: Mapping[str, Mapping[str, Any]],
    when: str,
) -> Iterator[Finding]:
    lost = sorted(n for n in expected if expected[n] and not found.get(n))
    if lost:
        yield Finding(
            Cause.STATE,
            f"optimizer state of {len(lost)} of {len(expected)} parameters is gone {when} "
            f"({lost[0]!r} first): the optimizer was built again, or its state cleared",
            update=u,
            rank=rank,
            tensor=lost[0],
        )
        return
    for name in expected:
        for key, value in expected[name].items():
            other = found.get(name, {}).get(key)
            if same_values(value, other):
                continue
            what = f"optimizer state {key!r} of {name!r}"
            if isinstance(value, Tensor) and isinstance(other, Tensor):
                found_so = _moved(rank, u, what, name, value, other, when)
            else:
                found_so = Finding(
                    Cause.STATE,
                    f"{what} is {other!r} and was {value!r} {when}",
                    update=u,
                    rank=rank,
                    tensor=name,
                )
            yield replace(found_so, about=About.COUNTER) if key == COUNTER else found_so


def _moved(
    rank: int, u: int, what: str, name: str, expected: Tensor, found: Tensor, when: str
) -> Finding:
    moved = ratio(distance(found, expected), norm(expected))
    return Finding(
        Cause.STATE,
        f"{what} moved by {moved:.3g} of its norm {when}, which nothing declares",
        update=u,
        rank=rank,
        tensor=name,
        distance=moved,
        tolerance=0.0,
    )


def _counters(rank: int, u: int, update: UpdateTrace) -> Iterator[Finding]:
    """State counters (``step`` in torch's optimizers) advance by one with an applied update."""
    for optimizer in update.optimizers:
        for name, after in optimizer.state_after.items():
            counted = count_of(after)
            if counted is None:
                continue
            before = count_of(optimizer.state_before.get(name, {})) or 0.0
            wanted = 1.0 if optimizer.applied else 0.0
            gradient = update.clipped.get(name)
            if counted - before != wanted and gradient is not None:
                yield Finding(
                    Cause.COUNTERS,
                    f"{optimizer.kind.__name__}'s counter of {name!r} went from {before:g} to "
                    f"{counted:g} in update {u}: expected {before + wanted:g}",
                    update=u,
                    rank=rank,
                    tensor=name,
                )
                break


def count_of(state: Mapping[str, Any]) -> float | None:
    value = state.get(COUNTER)
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return float(value) if isinstance(value, (int, float)) else None


def same_values(a: Any, b: Any) -> bool:
    """Equal element by element, NaN taken as equal to NaN; other values by ``==``."""
    if a is b:
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)
    a, b = dense(a), dense(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if torch.equal(a, b):
        return True
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def all_same(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> bool:
    """``same_values`` of every tensor of ``a`` with that of its name in ``b``."""
    return all(same_values(a[n], b.get(n)) for n in a)


def agreement(traces: Sequence[Trace]) -> tuple[list[Finding], tuple[str, ...]]:
    """Every rank's gradients and parameters against rank 0's, and a sentence a rank."""
    findings: list[Finding] = []
    said = ["rank 0: the reference for the others"] if len(traces) > 1 else ["rank 0: alone"]
    for trace in traces[1:]:
        found = list(_disagreements(traces[0], trace))
        findings += found
        said.append(
            f"rank {trace.rank}: gradients and parameters are rank 0's, bit for bit"
            if not found
            else f"rank {trace.rank}: {found[0].text}"
        )
    return findings, tuple(said)


def _disagreements(first: Trace, other: Trace) -> Iterator[Finding]:
    if len(first.updates) != len(other.updates):
        yield Finding(
            Cause.RANKS,
            f"rank {other.rank} attempted {len(other.updates)} updates and rank 0 "
            f"{len(first.updates)}",
            rank=other.rank,
        )
    for u, (a, b) in enumerate(zip(first.updates, other.updates, strict=False)):
        for what, mine, theirs in (
            ("gradient", a.gradient, b.gradient),
            ("clipped gradient", a.clipped, b.clipped),
            ("parameter after the update", a.after, b.after),
            ("average of weights", a.averages, b.averages),
        ):
            names = sorted(mine.keys() | theirs.keys())
            odd = [n for n in names if not same_values(mine.get(n), theirs.get(n))]
            if odd:
                found = ratio(
                    distance(theirs.get(odd[0]), mine.get(odd[0])), norm(mine.get(odd[0]))
                )
                yield Finding(
                    Cause.RANKS,
                    f"{what} {odd[0]!r} of rank {other.rank} is {found:.3g} of its norm away from "
                    f"rank 0's in update {u} ({len(odd)} of {len(names)} tensors differ)",
                    update=u,
                    rank=other.rank,
                    tensor=odd[0],
                    distance=found,
                    tolerance=0.0,
                )
                break
        yield from _other_scaler(other.rank, u, a, b)
        yield from _other_hyperparameters(
            other.rank,
            f"at update {u}",
            [optimizer.groups for optimizer in a.optimizers],
            [optimizer.groups for optimizer in b.optimizers],
        )
    yield from _other_hyperparameters(
        other.rank, "when the loop ends", first.groups_after, other.groups_after
    )


def _other_scaler(rank: int, u: int, mine: UpdateTrace, theirs: UpdateTrace) -> Iterator[Finding]:
    """Scale and growth tracker: with other ones a rank skips, or grows, where the others do not."""
    pairs = [("scale at the backward", theirs.scale, mine.scale)]
    pairs += [(k.strip("_"), theirs.scaler_after.get(k), v) for k, v in mine.scaler_after.items()]
    told = ", ".join(
        f"{what} {other:g} and {first:g}"
        for what, other, first in pairs
        if other is not None and first is not None and other != first
    )
    if told:
        yield Finding(
            Cause.RANKS,
            f"the loss scaler of rank {rank} is not rank 0's in update {u}: {told}",
            update=u,
            rank=rank,
        )


def _other_hyperparameters(
    rank: int, when: str, mine: Sequence[ParamGroups], theirs: Sequence[ParamGroups]
) -> Iterator[Finding]:
    """Where both hold the same parameters (an optimizer that is sharded over ranks does not)."""
    for a, b in zip(mine, theirs, strict=False):
        for (names, values), (other_names, others) in zip(a, b, strict=False):
            if names != other_names:
                continue
            odd = [key for key in values if not same_values(values[key], others.get(key))]
            if odd:
                yield Finding(
                    Cause.RANKS,
                    f"rank {rank} has {odd[0]}={others.get(odd[0])!r} and rank 0 "
                    f"{values[odd[0]]!r} {when}",
                    rank=rank,
                )
                return
