"""What a loader of the loop's own deals wrongly: the same to all, half of it, or what came before.

The ids that the forwards received are read in their order. Where some are unknown nothing is said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from equivtest.causes import Cause
from equivtest.compare.planned import some
from equivtest.diagnose.diagnosis import Covers, Diagnosis
from equivtest.diagnose.evidence import Evidence
from equivtest.diagnose.reading import Pass, Round, cut_as, passes, rounds

LEAST = 4
"""Examples in one order from which on that is no accident: one in 24, and with every example of an
epoch far less."""


def data(evidence: Evidence) -> Iterator[Diagnosis]:
    """Name what the order of the examples shows."""
    read = rounds(evidence.traces)
    if not read or not _own(evidence):
        return
    n = len(evidence.experiment.data)
    dealt, found = sharding(evidence, read), passes(read, n)
    if dealt is not None:
        yield dealt
    else:
        yield from _padding(evidence, read, found, n)
    if dealt is None or dealt.cause != Cause.NOT_SHARDED:
        yield from _order(evidence, read, found)


def sharding(evidence: Evidence, read: Sequence[Round]) -> Diagnosis | None:
    """Replicas share what they should not, or leave out what is theirs."""
    n = len(evidence.experiment.data)
    if len(read[0].ids) == 1 or not _own(evidence):
        return None
    return _not_sharded(evidence, read, n) or _double_sharding(evidence, read, n)


def _own(evidence: Evidence) -> bool:
    """The loop has a loader of its own: what it was handed deals nothing wrongly."""
    return any(m.by_contents for t in evidence.traces for u in t.updates for m in u.microbatches)


# -- the same examples on every replica


def _not_sharded(evidence: Evidence, read: Sequence[Round], n: int) -> Diagnosis | None:
    """Every replica reads all of the data: in one order, or each in its own."""
    D = len(read[0].ids)
    same = [Counter(one.ids[0]) == Counter(own) for one in read for own in one.ids[1:]]
    by_rank = [[i for one in read for i in one.ids[r]] for r in range(D)]
    if all(same):
        each = "every replica receives the same examples"
    elif _apart_in_order(evidence, by_rank, n):
        each = "every replica goes through all of the examples, each in an order of its own"
    else:
        return None
    first = read[0]
    distinct = {i for one in read if one.update == 0 for i in one.flat}
    total = sum(len(one.flat) for one in read if one.update == 0)
    text = (
        f"{each}: {some(sorted(set(first.ids[0])))} on replica 0 and "
        f"{some(sorted(set(first.ids[1])))} on replica 1 in microbatch 0 of update 0, which uses "
        f"{len(distinct)} different examples where {total} were read"
    )
    covers = _counters(evidence, read, math.ceil(n / max(map(len, first.ids))))
    return Diagnosis(Cause.NOT_SHARDED, text, (Covers({Cause.EXAMPLES}), *covers), update=0)


def _apart_in_order(evidence: Evidence, by_rank: Sequence[Sequence[int]], n: int) -> bool:
    """Replicas overlap in what each of them reads once: more than any padding makes them."""
    share = min(n, *(len(ids) for ids in by_rank))
    heads = [ids[:share] for ids in by_rank]
    if any(len(set(head)) < share for head in heads):
        return False
    overlap = sum(len(head) for head in heads) - len({i for head in heads for i in head})
    padding = evidence.case.plan.examples
    return overlap > padding and share > math.ceil(n / len(by_rank))


# -- a shard of a shard


def _double_sharding(evidence: Evidence, read: Sequence[Round], n: int) -> Diagnosis | None:
    """Each replica reads a shard of its shard."""
    D = len(read[0].ids)
    own = [tuple(i for one in read for i in one.ids[r]) for r in range(D)]
    share = math.ceil(math.ceil(n / D) / D)
    if not (_in_shards_of_shards(own, n) or _begun_anew(own, share, n)):
        return None
    never = sorted(set(range(n)) - {i for ids in own for i in ids[:share]})
    text = (
        f"replica 0 reads {some(own[0][:share])} and replica 1 {some(own[1][:share])} in an epoch, "
        f"{share} of {n} examples each where a share is {math.ceil(n / D)}: {len(never)} examples "
        f"({some(never)}) are left out"
    )
    size = max(map(len, read[0].ids))
    covers = _counters(evidence, read, math.ceil(share / size))
    return Diagnosis(Cause.DOUBLE_SHARDING, text, (Covers({Cause.EXAMPLES}), *covers), update=0)


def _strided(ids: Sequence[int], r: int, D: int) -> Sequence[int]:
    return ids[r::D]


def _blocks(ids: Sequence[int], r: int, D: int) -> Sequence[int]:
    size = math.ceil(len(ids) / D)
    return ids[r * size : (r + 1) * size]


def _in_shards_of_shards(own: Sequence[Sequence[int]], n: int) -> bool:
    """In the order in which samplers without a shuffle deal them, twice, and not as dealt once."""
    D, deals, every = len(own), (_strided, _blocks), range(n)
    if sum(map(len, own)) < LEAST:
        return False

    def as_dealt(shards: Sequence[Sequence[int]]) -> bool:
        pairs = zip(own, shards, strict=True)
        return all(list(s[: len(ids)]) == list(ids[: len(s)]) for ids, s in pairs)

    once = [[deal(every, r, D) for r in range(D)] for deal in deals]
    twice = [[deal(s, r, D) for r, s in enumerate(one)] for one in once for deal in deals]
    return not any(map(as_dealt, once)) and any(map(as_dealt, twice))


def _begun_anew(own: Sequence[Sequence[int]], share: int, n: int) -> bool:
    """Shuffled anew every ``share`` examples, and no two replicas ever share one."""
    D = len(own)
    if share < 2 or share >= n // D or min(map(len, own)) < 2 * share:
        return False
    chunks = [[ids[i : i + share] for i in range(0, len(ids), share)] for ids in own]
    distinct = all(len(set(c)) == len(c) for replica in chunks for c in replica)
    anew = all(set(replica[0]) != set(replica[1]) for replica in chunks)
    drawn = any(sorted(replica[0]) != list(replica[0]) for replica in chunks)
    back = all(len(set(ids[: n // D])) < n // D for ids in own)
    apart = sum(len(set(ids)) for ids in own) == len({i for ids in own for i in ids})
    return distinct and anew and drawn and back and apart and not all(map(_periodic, own))


def _periodic(ids: Sequence[int]) -> bool:
    """One order, over and over: how long it is says what was dealt."""
    period = next((k for k, i in enumerate(ids) if i in ids[:k]), len(ids))
    return period < len(ids) and all(i == ids[k % period] for k, i in enumerate(ids))


# -- padding


def _padding(
    evidence: Evidence, read: Sequence[Round], found: Sequence[Pass], n: int
) -> Iterator[Diagnosis]:
    """Examples that came twice to fill up the end of an epoch, on top of all others."""
    D, groups = len(read[0].ids), evidence.case.groups
    for one in found:
        times = one.times
        twice = sorted(i for i, many in times.items() if many > 1)
        last = one.updates[-1]
        at_end = Counter(i for r in one.rounds if r.update == last for i in r.flat)
        added = times.total() - n
        size = max(map(len, read[0].ids))
        equal = len({len(one.sequence(r)) for r in range(D)}) == 1
        uneven = _uneven(n, D, size if size in evidence.case.plan.sizes else 1)
        fills = uneven and one.ended and len(times) == n and 0 < added < size * D and equal
        if not fills or any(not at_end[i] for i in twice):
            continue
        text = (
            f"{n} examples do not come out even over {uneven}, and examples {some(twice)} "
            f"came again in update {last} to fill them up: {times.total()} were used"
        )
        updates = {g.update for g in groups if last < len(groups) and g.epoch == groups[last].epoch}
        covers = (Covers({Cause.EXAMPLES}, updates), *_padded_counters(evidence, last))
        yield Diagnosis(Cause.PADDING_DUPLICATES, text, covers, update=last)


def _uneven(n: int, D: int, m: int) -> str:
    """What so many examples do not come out even over, in words; empty where they do."""
    if n % D:
        return f"{D} replicas"
    return f"{D} batches of {m}" if n % (m * D) else ""


def _padded_counters(evidence: Evidence, last: int) -> tuple[Covers, ...]:
    """The last group may have more microbatches for what it was filled up with, none beyond A."""
    updates = [trace.updates[last] for trace in evidence.traces if last < len(trace.updates)]
    lengths = {len(update.microbatches) for update in updates}
    fits = len(lengths) == 1 and max(lengths) <= evidence.case.plan.A
    return (Covers({Cause.COUNTERS}, {last}),) if fits else ()


# -- order


def _order(evidence: Evidence, read: Sequence[Round], found: Sequence[Pass]) -> Iterator[Diagnosis]:
    """A later epoch in the order of the first, where the experiment shuffles each anew."""
    if not evidence.experiment.shuffle or len(found) < 2:
        return
    first, later = found[0], found[1:]
    D = len(read[0].ids)
    for one in later:
        sequences = [(one.sequence(r), first.sequence(r)) for r in range(D)]
        read_again = min(sum(len(a) for a, _ in sequences), sum(len(b) for _, b in sequences))
        if read_again < LEAST or any(a != b[: len(a)] for a, b in sequences):
            return
    text = (
        f"the experiment shuffles each epoch, and update {later[0].updates[0]} begins a second one "
        f"in the order of the first: {some(first.sequence(0))} on replica 0, both times"
    )
    yield Diagnosis(Cause.EPOCH_NOT_SET, text, update=later[0].updates[0])


# -- counters


def _counters(evidence: Evidence, read: Sequence[Round], per_pass: int) -> tuple[Covers, ...]:
    """The counters of a loop that goes ``per_pass`` microbatches and begins anew are no other."""
    fits = cut_as(read, evidence.case.plan.A, per_pass)
    return (Covers({Cause.COUNTERS}),) if fits else ()
