"""A few examples of a group, run with and without isolations: what a probe looks at."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from equivtest.distance import accumulate, distance, norm
from equivtest.isolate.calls import Call, by_key, elements, tensors, watching
from equivtest.isolate.cut.axes import COPIES, Layout, fits, layout, rows
from equivtest.isolate.cut.modules import Anatomy, NotCuttable
from equivtest.isolate.isolation import Isolation, Run, entered
from equivtest.isolate.probe.still import Statistics, batchnorm_aside, statistics, still
from equivtest.isolate.scene import Scene

FEW = 4
"""Examples that are probed first: enough for two microbatches of two."""

LOOKED_AT = 32
"""Examples of the group that are looked at at most."""

APART = 1e-9
"""Relative distance of gradients beyond which it is no rounding of a few examples in float64: a
coupling whose share is smaller is looked for by no probe, and stays unexplained."""

Chunks = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Seen:
    """One forward: the modules' calls, and totals and counts of the loss by term."""

    calls: tuple[Call, ...]
    totals: dict[str, float]
    counts: dict[str, float]


@dataclass
class Lab:
    """Small batches on the float64 bench, from where the scene's update starts.

    BatchNorm is put aside, and random operators draw constants.

    Attributes:
        chunks: the examples as microbatches; one after the other they are a batch.
    """

    scene: Scene
    chunks: Chunks

    @classmethod
    def few(cls, scene: Scene) -> Lab:
        """With up to ``FEW`` examples, the longest first and the shortest second: they pad each
        other."""
        distinct = list(dict.fromkeys(scene.group.flat))[:LOOKED_AT]
        by_size = sorted(distinct, key=cls(scene, ()).elements, reverse=True)
        ids = tuple(dict.fromkeys([by_size[0], by_size[-1], *distinct]))[:FEW]
        half = len(ids) // 2
        return cls(scene, tuple(part for part in (ids[:half], ids[half:]) if part))

    @classmethod
    def more(cls, scene: Scene) -> Lab:
        """With up to ``LOOKED_AT`` examples in the plan's microbatches: what takes many to couple
        (two experts, each chosen by some) may not show in few."""
        chunks: list[tuple[int, ...]] = []
        for chunk in scene.chunks:
            if chunks and sum(map(len, chunks)) + len(chunk) > LOOKED_AT:
                break
            chunks.append(chunk)
        return cls(scene, tuple(chunks))

    def batch(self, ids: Sequence[int]) -> Any:
        return self.scene.batches(ids)

    @property
    def examples(self) -> tuple[int, ...]:
        return tuple(i for chunk in self.chunks for i in chunk)

    def elements(self, i: int) -> int:
        """Of the batch of one example."""
        return elements(self.batch((i,)))

    @property
    def others(self) -> list[int]:
        """Examples of the group that can stand in for one."""
        return list(dict.fromkeys(self.scene.group.flat))[:LOOKED_AT]

    # -- forwards

    def forward(
        self,
        chunks: Sequence[Sequence[int]],
        isolations: Sequence[Isolation] = (),
        batch: Any = None,
    ) -> Seen:
        """Of ``chunks`` in one batch; a single one is a microbatch by itself."""
        with self._running(chunks, isolations) as run, watching(run.module) as calls:
            made, terms = run.bench.losses(self.batch(run.ids) if batch is None else batch)
        named = {t: loss for t, loss in zip(terms, made, strict=True) if t is not None}
        return Seen(
            tuple(calls),
            {term: float(loss.total.detach()) for term, loss in named.items()},
            {term: float(loss.count) for term, loss in named.items()},
        )

    def gradient(
        self,
        chunks: Sequence[Sequence[int]],
        isolations: Sequence[Isolation] = (),
        batch: Any = None,
    ) -> list[Tensor | None]:
        """Of the totals of ``chunks`` in one batch; a single one is a microbatch by itself."""
        with self._running(chunks, isolations) as run:
            made = self.batch(run.ids) if batch is None else batch
            return run.bench.run(made, lambda _, term, __: None if term is None else 1.0).gradients

    def separable(self, isolations: Sequence[Isolation]) -> bool:
        """The gradient of the chunks in one batch is the sum of the chunks' own."""
        parts = [
            self.gradient([chunk], isolations, batch)
            for chunk, batch in zip(self.chunks, self.part_batches(isolations), strict=True)
        ]
        return alike(added(parts), self.gradient(self.chunks, isolations))

    def averages(self) -> bool:
        """The gradient of the chunks in one batch is the mean of the chunks' own.

        Over examples or over the supervised elements of a term: the loss is a mean, not a sum.
        """
        whole = self.gradient(self.chunks)
        parts = [self.gradient([chunk]) for chunk in self.chunks]
        return any(alike(added(parts, weights), whole) for weights in self._mean_weights())

    def _mean_weights(self) -> Iterator[list[float]]:
        yield shares([len(chunk) for chunk in self.chunks])
        for term in self.scene.counts:
            yield shares([self.chunk_counts[chunk].get(term, 0.0) for chunk in self.chunks])

    def part_batches(self, isolations: Sequence[Isolation]) -> list[Any]:
        """The batch of each chunk by itself."""
        whole = self.batch(self.examples)
        return [self._part_batch(chunk, isolations, whole) for chunk in self.chunks]

    def _part_batch(
        self, chunk: tuple[int, ...], isolations: Sequence[Isolation], whole: Any
    ) -> Any:
        run = self._run([chunk])
        made = (isolation.part_batch(run, whole) for isolation in isolations)
        return next((batch for batch in made if batch is not None), self.batch(chunk))

    @cached_property
    def chunk_counts(self) -> dict[tuple[int, ...], dict[str, float]]:
        """Supervised elements of the chunks and of each example, by term.

        Where the model or the loss refuses a single example (a mean over the others), its share of
        its chunk's.
        """
        found: dict[tuple[int, ...], dict[str, float]] = {}
        for chunk in self.chunks:
            found[chunk] = self.forward([chunk]).counts
            for i in chunk:
                try:
                    found[i,] = self.forward([(i,)]).counts
                except Exception:
                    found[i,] = {term: n / len(chunk) for term, n in found[chunk].items()}
        return found

    @contextmanager
    def _running(
        self, chunks: Sequence[Sequence[int]], isolations: Sequence[Isolation]
    ) -> Iterator[Run]:
        run, bench, start = self._run(chunks), self.scene.bench, self.scene.start
        bench.load(start.parameters, start.buffers[0])
        isolated = entered(isolations, run, whole=len(chunks) > 1)
        with still(), batchnorm_aside(bench.module, self.statistics), torch.enable_grad(), isolated:
            yield run

    @cached_property
    def statistics(self) -> Statistics:
        """Of the large batch."""
        scene = self.scene
        scene.bench.load(scene.start.parameters, scene.start.buffers[0])
        return statistics(
            scene.bench.module, lambda: scene.bench.losses(self.batch(scene.group.flat))
        )

    def _run(self, chunks: Sequence[Sequence[int]]) -> Run:
        own = tuple(tuple(chunk) for chunk in chunks)
        ids = tuple(i for chunk in own for i in chunk)
        return Run(self.scene.bench, ids, own, self.scene.group.update, self.scene.seed)

    # -- where the examples lie

    @cached_property
    def batch_layouts(self) -> tuple[Layout, ...] | None:
        """Of the tensors of a batch; None if its structure depends on the number of examples."""
        made = [tree_flatten(self.batch([self.examples[0]] * n)) for n in COPIES]
        if any(spec != made[0][1] for _, spec in made):
            return None
        return _layouts([tensors(leaves) for leaves, _ in made])

    @cached_property
    def anatomy(self) -> dict[tuple[str, int], Anatomy]:
        """Of every module's calls, by name and number."""
        seen = [by_key(self.forward([[self.examples[0]] * n]).calls) for n in COPIES]
        found = {}
        for key, first in seen[0].items():
            calls = [first, *(one[key] for one in seen[1:] if key in one)]
            inputs = _layouts([call.inputs for call in calls])
            outputs = _layouts([call.outputs for call in calls])
            if len(calls) == len(COPIES) and inputs is not None and outputs is not None:
                found[key] = Anatomy(inputs, outputs)
        return found

    def rows_of(self, batch: Any, begin: int, end: int, n: int) -> Any:
        """Examples ``begin`` to ``end`` of a batch of ``n``.

        Raises:
            NotCuttable: the batch axis of a tensor is not known.
        """
        return rows_of(batch, self.batch_layouts, begin, end, n)


def rows_of(batch: Any, layouts: Sequence[Layout] | None, begin: int, end: int, n: int) -> Any:
    """Examples ``begin`` to ``end`` of a batch of ``n``.

    Raises:
        NotCuttable: the batch axis of a tensor is not known.
    """
    leaves, spec = tree_flatten(batch)
    following = iter(layouts or ())
    cut = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            where = next(following, Layout(known=False))
            if not fits(leaf, where, n):
                raise NotCuttable
            leaf = rows(leaf, where, n, begin, end)
        cut.append(leaf)
    return tree_unflatten(cut, spec)


def _layouts(made: Sequence[Sequence[Tensor]]) -> tuple[Layout, ...] | None:
    if any(len(leaves) != len(made[0]) for leaves in made):
        return None
    return tuple(layout([leaf.shape for leaf in leaves]) for leaves in zip(*made, strict=True))


def added(
    parts: Sequence[Sequence[Tensor | None]], weights: Sequence[float] | None = None
) -> list[Tensor | None]:
    total: list[Tensor | None] = [None] * len(parts[0])
    for part, weight in zip(parts, weights or [1.0] * len(parts), strict=True):
        accumulate(total, part, weight)
    return total


def shares(sizes: Sequence[float]) -> list[float]:
    """Each over their sum."""
    return [size / (sum(sizes) or 1.0) for size in sizes]


def alike(a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> bool:
    """Within ``APART`` of the larger, tensor by tensor."""
    largest = max((norm(x) for x in (*a, *b)), default=0.0)
    return all(
        distance(x, y) <= APART * max(norm(x), norm(y)) or distance(x, y) <= 1e-12 * largest
        for x, y in zip(a, b, strict=True)
    )
