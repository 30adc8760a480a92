"""A loop that updates after every microbatch: what each of its updates used. Pure.

It is judged update by update on the microbatch that it used, with the denominator that the loss has
in the plan: the supervised elements of the whole group.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from equivtest.arms.case import Case
from equivtest.compare.continuity import all_same
from equivtest.observe.trace import Trace
from equivtest.plan import GroupLayout


def after_each(case: Case, traces: Sequence[Trace]) -> bool:
    """Every rank attempts an update after each of the plan's microbatches, several to a group.

    An optimizer that accumulates in itself is called as often, and moves nothing until the last.
    """
    planned = [len(group.ids[0]) for group in case.groups]
    if max(planned) < 2:
        return False
    return all(
        len(trace.updates) == sum(planned)
        and all(u.observed and len(u.microbatches) == 1 for u in trace.updates)
        and any(not all_same(trace.updates[j].before, trace.updates[j].after) for j in _early(case))
        for trace in traces
    )


def one_by_one(case: Case, traces: Sequence[Trace]) -> tuple[GroupLayout, ...] | None:
    """Groups of one microbatch, as the updates used them; None for another loop."""
    if not after_each(case, traces):
        return None
    used = [tuple(trace.updates[j].microbatches[0].ids for trace in traces) for j in _all(case)]
    if any(ids is None for replicas in used for ids in replicas):
        return None
    known = [tuple(ids or () for ids in replicas) for replicas in used]
    groups = []
    for group, (j, whole) in zip(case.groups, _blocks(case), strict=False):
        counted = tuple(i for k in whole for ids in known[k] for i in ids)
        ids = tuple((own,) for own in known[j])
        groups.append(replace(group, ids=ids, counted=counted))
    return tuple(groups)


def _early(case: Case) -> list[int]:
    """Updates that are not the last of their group."""
    return [j for j, whole in _blocks(case) if j + 1 < whole.stop]


def _all(case: Case) -> range:
    return range(sum(len(group.ids[0]) for group in case.groups))


def _blocks(case: Case) -> Iterator[tuple[int, range]]:
    """Each update, and those that use the microbatches of the same group of the plan."""
    first = 0
    for group in case.groups:
        whole = range(first, first + len(group.ids[0]))
        yield from ((j, whole) for j in whole)
        first = whole.stop
