"""The two float64 arms of one update, large batch and split, with sources isolated in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from equivtest.arms.bench import Bench
from equivtest.arms.oracle import Cut, Whole
from equivtest.arms.reference import Reference, drawn
from equivtest.arms.replay import Start, replay
from equivtest.arms.synchronised import rounds
from equivtest.batches import Batches, Counts
from equivtest.isolate.calls import tensors
from equivtest.isolate.isolation import Isolation, Run, entered
from equivtest.observe.trace import MicrobatchTrace
from equivtest.plan import GroupLayout


@dataclass
class Scene:
    """One update whose split is to be explained.

    Attributes:
        bench, batches: float64.
        counts: supervised elements of the group by term.
        chunk_counts: those of each microbatch with examples, in the order of ``chunks``.
        oracle, cut: the arms with nothing isolated.
        seen: the candidate's microbatches by replica, with the random numbers that they drew and no
            root factors.
        seed: the experiment's.
        untold: what was seen of a source that could not be isolated, in sentences.
        reruns: pairs of arms that were run here.
    """

    bench: Bench
    batches: Batches
    group: GroupLayout
    start: Start
    counts: Counts
    chunk_counts: tuple[Counts, ...]
    oracle: Whole
    cut: Cut
    seen: Sequence[Sequence[MicrobatchTrace]] | None
    seed: int
    untold: list[str] = field(default_factory=list, init=False)
    reruns: int = field(default=0, init=False)

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The plan's microbatches with examples; one after the other they are the large batch."""
        return tuple(ids for replica in self.group.ids for ids in replica if ids)

    @cached_property
    def scale(self) -> list[float]:
        """``S_t``; where the oracle's random numbers left nothing of it, what the split added."""
        largest = max(self.oracle.scale, default=0.0)
        return [s or c or largest for s, c in zip(self.oracle.scale, self.cut.scale, strict=True)]

    @cached_property
    def whole_batch(self) -> Any:
        return self.batches(self.group.flat)

    @property
    def reorders(self) -> bool:
        """Collate makes the same batch of the group's examples in another order."""
        ids = self.group.flat
        made, turned = tensors(self.whole_batch), tensors(self.batches(ids[::-1]))
        return len(made) == len(turned) and all(map(torch.equal, made, turned))

    def run(self, ids: Sequence[int]) -> Run:
        """What a forward of ``ids`` is to an isolation."""
        own = tuple(ids)
        chunks = self.chunks if own == self.group.flat else (own,)
        return Run(self.bench, own, chunks, self.group.update, self.seed)

    def pair(self, isolations: Sequence[Isolation]) -> tuple[Cut, Whole]:
        """Split and large batch with ``isolations`` in them."""
        if not isolations:
            return self.cut, self.oracle
        self.reruns += 1
        whole = replace(
            self.oracle, around=self._around(isolations, whole=True), _runs={}, _cuts={}
        )
        _ = whole.gradients
        if not any(isolation.parts_too for isolation in isolations):
            return self.cut, whole
        return self._split(isolations), whole

    def _around(
        self, isolations: Sequence[Isolation], *, whole: bool
    ) -> Callable[[Sequence[int]], AbstractContextManager[None]]:
        return lambda ids: entered(isolations, self.run(ids), whole=whole)

    def part_batch(self, isolations: Sequence[Isolation], ids: Sequence[int]) -> Any:
        """The batch of a microbatch with ``isolations``."""
        for isolation in isolations if ids else ():
            made = isolation.part_batch(self.run(ids), self.whole_batch)
            if made is not None:
                return made
        return self.batches(ids)

    def _split(self, isolations: Sequence[Isolation]) -> Cut:
        found = replay(
            self.bench,
            lambda ids: self.part_batch(isolations, ids),
            self.group,
            self.counts,
            self.start,
            self.seen,
            around=self._around(isolations, whole=False),
        )
        return Cut(found.expected, found.scale, found.loss)


def scene_of(
    reference: Reference,
    group: GroupLayout,
    start: Start,
    seen: Sequence[Sequence[MicrobatchTrace]],
) -> Scene:
    """Oracle and split of a group, for sources to be isolated in them.

    Args:
        seen: the candidate's microbatches by replica.
    """
    group = rounds(reference.bench64.module, group)
    by_replica = zip(group.ids, reference.counts(group), strict=True)
    return Scene(
        bench=reference.bench64,
        batches=reference.batches64,
        group=group,
        start=start.shared,
        counts=reference.total(group),
        chunk_counts=tuple(
            count
            for ids, counts in by_replica
            for own, count in zip(ids, counts, strict=True)
            if own
        ),
        oracle=reference.oracle(group, start),
        cut=reference.split(group, start, seen),
        seen=drawn(seen),
        seed=reference.seed,
    )
