"""Windows: what became of the microbatches at the end of an epoch that do not fill a group."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

from equivtest.causes import Cause
from equivtest.compare.planned import some
from equivtest.compare.used import beside_the_plan
from equivtest.diagnose.data import sharding
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.diagnose.evidence import Evidence, UpdateEvidence
from equivtest.diagnose.reading import Pass, Round, lengths, passes, rounds
from equivtest.observe.trace import UpdateTrace

FACTOR = 1e-6
"""How far a root factor may be from a denominator's: roundings of the loss's dtype, float32 and
above, and well below what another count makes of it."""


def windows(evidence: Evidence) -> Iterator[Diagnosis]:
    """Name a tail that was dropped or that leaks, and a loop that ends too early."""
    read = rounds(evidence.traces)
    if not read:
        return
    n = len(evidence.experiment.data)
    found = passes(read, n)
    leaks = _leaks(evidence, found)
    kept = [one for one in read if one.k >= _cleared_in(evidence, one.update)]
    misdealt = sharding(evidence, read) is not None
    dropped = None if leaks or misdealt else _dropped(evidence, kept, passes(kept, n))
    stopped = None if leaks or dropped else _stopped(evidence, read)
    yield from (one for one in (leaks, dropped, stopped) if one is not None)


# -- a tail that joins the next epoch


def joins(evidence: Evidence) -> dict[int, int]:
    """Updates that go on from one epoch into the next, with their microbatches of the first."""
    read = rounds(evidence.traces)
    n = len(evidence.experiment.data)
    whole = [(a, b) for a, b in pairwise(passes(read or [], n)) if len(a.times) == n]
    turns = [(a.rounds[-1], b.rounds[0]) for a, b in whole]
    return {new.update: new.k for old, new in turns if old.update == new.update}


def _leaks(evidence: Evidence, found: Sequence[Pass]) -> Diagnosis | None:
    joined = joins(evidence)
    seen = evidence.traces[0].updates
    A = evidence.case.plan.A
    # Under last_group="drop" the plan's own epochs miss examples, and seem to go on into the next.
    beside = {one.u for one in evidence.updates if beside_the_plan(one.planned, one.used)}
    leaking = {
        u: k for u, k in joined.items() if k < A and u in beside and not _cleared(seen[u], k)
    }
    if not leaking:
        return None
    u, k = next(iter(leaking.items()))
    old = sorted(
        i for one in found for r in one.rounds if r.update == u and r.k < k for i in r.flat
    )
    text = (
        f"update {u} uses {k} microbatches that end one epoch (examples {some(old)}) and "
        f"{len(seen[u].microbatches) - k} that begin the next: the first were neither applied nor "
        "cleared at the end of their epoch"
    )
    counted = _window_lengths(evidence, joined)
    covers = [Covers({Cause.EXAMPLES})]
    covers += [Covers({Cause.COUNTERS})] if counted else []
    covers += [
        Covers({Cause.GRADIENT}, {one.u})
        for one in evidence.updates
        if one.u in leaking and own_counts(evidence, one)
    ]
    return Diagnosis(Cause.TAIL_LEAKS, text, tuple(covers), update=u)


def _window_lengths(evidence: Evidence, joined: dict[int, int]) -> bool:
    """Every update has A microbatches, those of an earlier epoch among them or beside them."""
    A = evidence.case.plan.A
    found = [len(update.microbatches) for update in evidence.traces[0].updates]
    left = [trace.left_over for trace in evidence.traces]
    fits = all(
        n == A or (u in joined and n == A + joined[u]) or (n < A and u == len(found) - 1)
        for u, n in enumerate(found)
    )
    return fits and max(left) < A and len(set(left)) == 1


def _cleared(update: UpdateTrace, k: int) -> bool:
    """Gradients were cleared between microbatch ``k - 1`` and the next."""
    return any(op.kind == "zero" and op.microbatch == k - 1 for op in update.operations)


def _cleared_in(evidence: Evidence, u: int) -> int:
    """How many microbatches of an earlier epoch were cleared in update ``u``."""
    k = joins(evidence).get(u, 0)
    return k if k and _cleared(evidence.traces[0].updates[u], k) else 0


def own_counts(evidence: Evidence, one: UpdateEvidence) -> bool:
    """Each microbatch was divided by the count of the plan's group that it is in.

    By the factors that were seen, in an update that joins two of the plan's groups: their weights
    in its gradient are those that the groups' own counts give them.
    """
    D, scale = len(one.seen), one.seen[0].scale or 1.0
    whole = {g: _count(evidence, one, g) for g in _groups_of(evidence, one)}
    if None in whole.values():
        return False
    for r, update in enumerate(one.seen):
        for k, m in enumerate(update.microbatches):
            counts = whole[_home(evidence, one.used.ids[r][k])] or []
            wanted = sorted(D * scale / count for count in counts if count)
            found = sorted(factor for factor in m.factors if factor is not None)
            alike = zip(found, wanted, strict=False)
            if not found or not len(found) == len(wanted) == len(counts) == len(m.factors):
                return False
            if not all(math.isclose(a, b, rel_tol=FACTOR) for a, b in alike):
                return False
    return True


def _groups_of(evidence: Evidence, one: UpdateEvidence) -> list[int]:
    homes = [_home(evidence, ids) for replica in one.used.ids for ids in replica]
    return list(dict.fromkeys(homes))


def _home(evidence: Evidence, ids: Sequence[int]) -> int:
    """The first of the plan's groups that holds these examples, or -1."""
    groups = evidence.case.groups
    return next((g.update for g in groups if set(ids) <= set(g.flat)), -1)


def _count(evidence: Evidence, one: UpdateEvidence, group: int) -> list[float] | None:
    """Supervised elements by term of one of the plan's groups, all of which the update holds."""
    if group < 0:
        return None
    total: dict[str, float] = {}
    held: list[int] = []
    for replica, counts in zip(one.used.ids, one.counts, strict=True):
        for ids, by_term in zip(replica, counts, strict=True):
            if _home(evidence, ids) == group:
                for term, count in by_term.items():
                    total[term] = total.get(term, 0.0) + count
                held += ids
    whole = sorted(held) == sorted(evidence.case.groups[group].flat)
    return list(total.values()) if whole else None


# -- a tail that is never used


def _dropped(evidence: Evidence, read: Sequence[Round], found: Sequence[Pass]) -> Diagnosis | None:
    """Passes end without what does not fill a group, where the plan processes it."""
    n, plan = len(evidence.experiment.data), evidence.case.plan
    tails = [g for g in evidence.case.groups if g.partial]
    if not tails or not found:
        return None
    ended = [one for one in found if one.ended or _ends_before_tail(evidence, one, read)]
    left = [n - len(one.times) for one in ended]
    whole = all(one.times.total() == len(one.times) for one in found)
    if not ended or not whole or not all(0 < many < plan.examples for many in left):
        return None
    if set(lengths(read)) != {plan.A}:
        return None
    missing = sorted(set(range(n)) - set(ended[0].times))
    text = (
        f"{left[0]} of {n} examples ({some(missing)}) do not fill a group of {plan.examples} and "
        f"were never used in epoch 0: {len(evidence.traces[0].updates)} updates for "
        f"{len(evidence.case.groups)}"
    )
    covers = [Covers({Cause.EXAMPLES, Cause.COUNTERS})]
    covers += [
        Covers({Cause.GRADIENT}, {one.u})
        for one in evidence.updates
        if _cleared_in(evidence, one.u) and own_counts(evidence, one)
    ]
    others = (Cause.MICRO_VS_UPDATE,) if _stopped(evidence, read) else ()
    at = ended[0].updates[-1]
    return Diagnosis(Cause.TAIL_DROPPED, text, tuple(covers), update=at, alternatives=others)


def _ends_before_tail(evidence: Evidence, one: Pass, read: Sequence[Round]) -> bool:
    """The loop ended with this pass, and of the plan's epoch only the tail is left."""
    groups, last = evidence.case.groups, read[-1]
    if one.rounds[-1] is not last or len(evidence.traces[0].updates) >= len(groups):
        return False
    per_epoch = [g for g in groups if g.epoch == 0]
    return len(one.updates) == len(per_epoch) - 1 and per_epoch[-1].partial


# -- a loop that ends too early


def _stopped(evidence: Evidence, read: Sequence[Round]) -> Diagnosis | None:
    """It ended with as many microbatches as updates were planned."""
    groups, A = evidence.case.groups, evidence.case.plan.A
    done = lengths(read)
    left = {trace.left_over for trace in evidence.traces}
    if A == 1 or len(done) >= len(groups) or len(left) != 1 or evidence.found(Cause.EXAMPLES):
        return None
    ran, over = sum(done), left.pop()
    reached = ran + over == len(groups) if over else ran >= len(groups) > ran - done[-1]
    if not reached or any(n != len(groups[u].ids[0]) for u, n in enumerate(done)):
        return None
    text = (
        f"the loop ended after {ran + over} microbatches and {len(done)} updates, where "
        f"{len(groups)} updates are planned, as one whose limit is counted in microbatches does"
        + (" (one that is simply an update short too)" if len(done) == len(groups) - 1 else "")
    )
    return Diagnosis(Cause.MICRO_VS_UPDATE, text, (Covers({Cause.COUNTERS}),), update=len(done) - 1)
