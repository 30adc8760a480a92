"""The examples that forwards received beside those of the plan, over replicas and epochs. Pure.

A loop with a loader of its own is compared on what it used. Its sampler may deal examples to
replicas in its own way, and shuffle them in its own order: as long as each epoch uses each example
as often as the plan, that is the loop's business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from equivtest.arms.case import Case
from equivtest.causes import Cause
from equivtest.compare import planned
from equivtest.compare.planned import some
from equivtest.compare.tables import ExampleRow
from equivtest.compare.verdict import Finding
from equivtest.observe.trace import MicrobatchTrace, Trace, UpdateTrace
from equivtest.plan import GroupLayout

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Received:
    """What the forwards of one update received.

    Attributes:
        ids: by replica and microbatch; None where it is unknown.
        own: some of it came from a loader of the loop's own.
    """

    ids: tuple[tuple[Ids | None, ...], ...]
    own: bool

    @property
    def known(self) -> bool:
        """Of every microbatch, in equal number on every replica."""
        lengths = {len(replica) for replica in self.ids}
        every = all(ids is not None for replica in self.ids for ids in replica)
        return every and len(lengths) == 1 and lengths != {0}

    @property
    def flat(self) -> list[int]:
        """All ids that are known."""
        return [i for replica in self.ids for ids in replica if ids for i in ids]


def received(
    case: Case, traces: Sequence[Trace], as_planned: Collection[int] = ()
) -> list[Received]:
    """By update that every rank attempted; in those ``as_planned`` it is what the plan deals."""
    seen = [
        Received(
            tuple(tuple(m.ids for m in update.microbatches) for update in updates),
            any(m.by_contents for update in updates for m in update.microbatches),
        )
        for updates in zip(*(trace.updates for trace in traces), strict=False)
    ]
    for u in as_planned:
        seen[u] = Received(case.groups[u].ids, own=True)
    return seen


def used_groups(case: Case, traces: Sequence[Trace]) -> tuple[GroupLayout, ...]:
    """The case's groups, those in place of which the loop used others as they were used.

    A loop that got the plan's batches is judged by the plan, unless it used another group's.
    """
    groups = list(case.groups)
    for u, (group, one) in enumerate(zip(case.groups, received(case, traces), strict=False)):
        if one.known and (one.own or _foreign(group, one)):
            ids = tuple(tuple(ids or () for ids in replica) for replica in one.ids)
            if ids != group.ids:
                groups[u] = replace(group, ids=ids)
    return tuple(groups)


def beside_the_plan(planned: GroupLayout, used: GroupLayout) -> bool:
    """The examples used are not the plan's, wherever they were dealt to."""
    return Counter(planned.flat) != Counter(used.flat)


def _foreign(group: GroupLayout, one: Received) -> bool:
    """Some rank received what the plan deals to it in no microbatch of this group."""
    return any(
        set(ids or ()) - {i for dealt in own for i in dealt}
        for own, replica in zip(group.ids, one.ids, strict=True)
        for ids in replica
    )


def examples(
    case: Case, traces: Sequence[Trace], as_planned: Collection[int] = ()
) -> Iterator[Finding]:
    """Examples that are not the plan's: of a loader of the loop's own, over each epoch.

    Args:
        as_planned: updates whose gradient is the plan's, whatever the forwards received.
    """
    seen = received(case, traces, as_planned)
    if not any(one.own for one in seen):
        for trace in traces:
            yield from planned.examples(case, trace)
        return
    for epoch in _epochs(case, seen):
        problem = epoch.problem
        if problem:
            yield Finding(Cause.EXAMPLES, f"{epoch.where}, {problem}", update=epoch.first_odd)


def misused(case: Case, traces: Sequence[Trace]) -> set[int]:
    """Updates of epochs that use an example twice or never, or of a loop that has others' batches.

    An order of the loop's own is none.
    """
    seen = received(case, traces)
    if not any(one.own for one in seen):
        return {
            u for u, (g, one) in enumerate(zip(case.groups, seen, strict=False)) if _foreign(g, one)
        }
    return {g.update for epoch in _epochs(case, seen) if epoch.problem for g in epoch.groups}


def without(traces: Sequence[Trace], updates: Collection[int]) -> list[Trace]:
    """The traces with the examples of these updates unknown: what came there says nothing."""
    return [
        replace(
            trace,
            updates=tuple(
                replace(one, microbatches=tuple(replace(m, ids=None) for m in one.microbatches))
                if u in updates
                else one
                for u, one in enumerate(trace.updates)
            ),
        )
        for trace in traces
    ]


def audit(case: Case, traces: Sequence[Trace]) -> tuple[ExampleRow, ...]:
    """Which examples each microbatch received beside those that the plan deals to it.

    A microbatch of the plan that never ran received none.
    """
    return tuple(row for trace in traces for row in _audited(case, trace))


def _audited(case: Case, trace: Trace) -> Iterator[ExampleRow]:
    for u in range(max(len(case.groups), len(trace.updates))):
        ran = trace.updates[u].microbatches if u < len(trace.updates) else ()
        dealt = case.groups[u].ids[trace.rank] if u < len(case.groups) else ()
        for k, m in enumerate(ran):
            planned = dealt[k] if k < len(dealt) else None
            yield ExampleRow(u, trace.rank, k, m.ids, planned, m.by_contents)
        for k in range(len(ran), len(dealt)):
            yield ExampleRow(u, trace.rank, k, (), dealt[k])


def order_notes(
    case: Case, traces: Sequence[Trace], as_planned: Collection[int] = ()
) -> Iterator[str]:
    """A note on epochs in an order of the loop's own, and on examples that could not be told."""
    seen = received(case, traces, as_planned)
    for u in as_planned:
        yield (
            f"forwards of update {u} received other examples than the plan's, and its gradient is "
            "the plan's: what came too often counts nothing there"
        )
    if any(one.own for one in seen):
        odd = [e for e in _epochs(case, seen) if e.odd and e.complete and not e.problem]
        if odd:
            yield (
                f"the loop has an order of its own from update {odd[0].first_odd} on: each epoch "
                "uses each example as often as the plan, and each update is judged on the examples "
                "that it used"
            )
    for reason in dict.fromkeys(trace.untold for trace in traces if trace.untold):
        if any(m.ids is None for t in traces for u in t.updates for m in u.microbatches):
            yield f"which examples some forwards received is unknown: {reason}"


@dataclass(frozen=True)
class _Epoch:
    """The updates that the plan has in one epoch, and what they used."""

    groups: Sequence[GroupLayout]
    seen: Sequence[Received]
    number: int
    cut: bool

    @property
    def complete(self) -> bool:
        return not self.cut and all(one.known for one in self.seen)

    @property
    def odd(self) -> list[int]:
        """Updates that use other examples than the plan's."""
        pairs = zip(self.groups, self.seen, strict=True)
        return [g.update for g, one in pairs if Counter(one.flat) != Counter(g.flat) and one.flat]

    @property
    def first_odd(self) -> int:
        return self.odd[0]

    @property
    def where(self) -> str:
        first, last = self.groups[0].update, self.groups[-1].update
        which = f"update {first}" if first == last else f"updates {first} to {last}"
        return f"in {which} (epoch {self.number})"

    @property
    def problem(self) -> str:
        """What no order explains, in words."""
        if not self.odd:
            return ""
        times = Counter(i for one in self.seen for i in one.flat)
        twice = sorted(i for i, n in times.items() if n > 1)
        wanted = [i for group in self.groups for i in group.flat]
        told = []
        if twice:
            most = max(times.values())
            often = "twice" if most == 2 else f"up to {most} times"
            told.append(f"examples {some(twice)} came {often}")
        if self.complete and times.total() - len(twice) < len(wanted):
            missing = sorted(set(wanted) - set(times))
            if missing:
                told.append(f"examples {some(missing)} never came")
        if self.complete and not told and times.total() != len(wanted):
            told.append(f"{times.total()} examples came: the plan has {len(wanted)}")
        return ", and ".join(told)


def _epochs(case: Case, seen: Sequence[Received]) -> Iterator[_Epoch]:
    by_epoch: dict[int, list[GroupLayout]] = {}
    for group in case.groups:
        by_epoch.setdefault(group.epoch, []).append(group)
    for number, groups in by_epoch.items():
        ran = [group for group in groups if group.update < len(seen)]
        if ran:
            own = [seen[group.update] for group in ran]
            yield _Epoch(ran, own, number, cut=len(ran) < len(groups))


def told_apart(case: Case, traces: Sequence[Trace]) -> list[Trace]:
    """The traces with examples of equal contents told apart as the plan would have them.

    Nothing tells such examples apart, so none is said to come twice before all others came: the
    one used least so far, of these the one that the plan deals to the update, there to the replica.
    """
    classes = _classes(traces)
    if not classes:
        return list(traces)
    uses: Counter[int] = Counter()
    made: list[list[UpdateTrace]] = [[] for _ in traces]
    for u in range(max(len(trace.updates) for trace in traces)):
        group = case.groups[u] if u < len(case.groups) else None
        for rank, trace in enumerate(traces):
            if u < len(trace.updates):
                update = trace.updates[u]
                told = tuple(_told(m, classes, uses, group, rank) for m in update.microbatches)
                made[rank].append(replace(update, microbatches=told))
    return [replace(t, updates=tuple(us)) for t, us in zip(traces, made, strict=True)]


def _told(
    microbatch: MicrobatchTrace,
    classes: Mapping[int, Ids],
    uses: Counter[int],
    group: GroupLayout | None,
    rank: int,
) -> MicrobatchTrace:
    dealt = set() if group is None else {i for ids in group.ids[rank] for i in ids}
    whole = set() if group is None else set(group.flat)
    ids = []
    for i in microbatch.ids or ():
        members = classes.get(i, (i,)) if microbatch.by_contents else (i,)
        ids.append(min(members, key=lambda j: (uses[j], j not in dealt, j not in whole, j)))
        uses[ids[-1]] += 1
    return replace(microbatch, ids=tuple(ids)) if ids else microbatch


def _classes(traces: Sequence[Trace]) -> dict[int, Ids]:
    """By id, all whose contents are the same; ranks may each have seen some of them."""
    classes: dict[int, set[int]] = {}
    for one in (twins for trace in traces for twins in trace.twins):
        joined = set(one).union(*(classes.get(i, ()) for i in one))
        classes.update(dict.fromkeys(joined, joined))
    return {i: tuple(sorted(members)) for i, members in classes.items()}
