"""``source.dropout``: random numbers of the forward, other ones in a split than in the large batch.

Isolated by random numbers by example, in both arms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from equivtest.causes import Cause
from equivtest.isolate.calls import elements
from equivtest.isolate.isolation import Isolation, Run
from equivtest.isolate.random.fields import Layouts, Untied
from equivtest.isolate.random.keyed import Keyed
from equivtest.isolate.random.probing import probe
from equivtest.isolate.scene import Scene


@dataclass
class RandomNumbers(Isolation):
    """All that a forward draws, by example.

    Attributes:
        layouts: how its draws hold a batch.
        unkeyed: what could not be given by example while arms ran.
    """

    layouts: Layouts
    where: str
    cause: Cause = Cause.DROPOUT
    unkeyed: list[Untied] = field(default_factory=list)

    @property
    def parts_too(self) -> bool:
        return True

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        key = run.seed, run.update
        with Keyed(run.module, run.ids, key, self.layouts) as keyed:
            yield
        self.unkeyed += keyed.unkeyed

    part = whole

    def said(self) -> Sequence[str]:
        """One reason for each place: the first, which the others mostly follow from."""
        untied = [*self.layouts.odd, *self.unkeyed]
        first = {one.place or one.why: one for one in reversed(untied)}
        return [str(one) for one in dict.fromkeys(untied) if first[one.place or one.why] == one]


def detect(scene: Scene, _: Sequence[Isolation]) -> list[Isolation]:
    """A forward that draws."""
    drew = any(m.rng is not None for replica in scene.seen or () for m in replica)
    if not (drew or scene.oracle.drew or _draws_by_itself(scene)):
        return []
    layouts = layouts_of(scene)
    return [RandomNumbers(layouts, f"first {layouts.first}" if layouts.first else "")]


def _draws_by_itself(scene: Scene) -> bool:
    """By a generator of the model's own, which is in no state that is watched."""
    ids = scene.group.flat
    with Keyed(scene.bench.module, ids, (scene.seed, scene.group.update)) as keyed:
        _forward(scene, ids)
    return keyed.first is not None


def layouts_of(scene: Scene) -> Layouts:
    """How the draws of the scene's forward hold a batch."""
    lengths = {i: elements(scene.batches((i,))) for i in scene.group.flat}
    key = scene.seed, scene.group.update
    return probe(scene.bench.module, partial(_forward, scene), lengths, key)


def _forward(scene: Scene, ids: Sequence[int]) -> float:
    """The sum of the loss totals of a batch."""
    scene.bench.load(scene.start.parameters, scene.start.buffers[0])
    made, terms = scene.bench.losses(scene.batches(ids))
    pairs = zip(made, terms, strict=True)
    return sum(float(loss.total.detach()) for loss, term in pairs if term is not None)
