"""``source.coupling``: examples that see each other, in collate, in a module or in the loss.

Found by a probe of a few examples, and isolated where it enters, everything else unchanged: the
module, or the loss behind the model, runs on one microbatch after the other inside the large batch;
what enters through collate (padding that leaks, a normalisation over the batch) by microbatches
that are rows of the large batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from equivtest.causes import Cause
from equivtest.isolate.cut.axes import Layout
from equivtest.isolate.cut.losses import loss_in_chunks
from equivtest.isolate.cut.modules import Anatomy, NotCuttable, in_chunks
from equivtest.isolate.isolation import Isolation, Run
from equivtest.isolate.places import Place
from equivtest.isolate.probe.entry import couples_in_loss, first_coupling
from equivtest.isolate.probe.lab import Lab, rows_of, shares
from equivtest.isolate.probe.padding import where_padding_leaks
from equivtest.isolate.scene import Scene

MOST = 4
"""Places that one update is searched for."""

EXAMPLES = "examples"
SUM = "sum"
"""How a tensor that all examples share is put together from microbatches, beside by a term's
counts: as a mean over examples, or as a sum."""


@dataclass
class ModuleCoupling(Isolation):
    """A module in which examples see each other.

    Attributes:
        name: its qualified name.
        anatomy: of its calls.
        inside: of those of the modules in it, by name within it, where they run on the large
            batch; None where they run in microbatches with it.
        weighing: a term of the loss, ``EXAMPLES`` or ``SUM``.
        counts: by microbatch and term.
    """

    name: str
    anatomy: tuple[Anatomy, ...]
    inside: Mapping[str, Sequence[Anatomy]] | None
    weighing: str
    counts: Mapping[tuple[int, ...], Mapping[str, float]]
    where: str
    cause: Cause = Cause.COUPLING
    _refused: list[str] = field(default_factory=list)

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        module = run.module.get_submodule(self.name)
        sizes = [len(ids) for ids in run.chunks]
        weights = self._weights(run)
        with in_chunks(module, self.anatomy, sizes, weights, self._refuse, self.inside):
            yield

    def said(self) -> Sequence[str]:
        return tuple(self._refused[:1])

    def _refuse(self) -> None:
        self._refused.append(
            f"the microbatches cannot be told apart in the tensors of `{self.name}`: it was not "
            "isolated"
        )

    def _weights(self, run: Run) -> list[float]:
        if self.weighing == SUM:
            return [1.0] * len(run.chunks)
        if self.weighing == EXAMPLES:
            return shares([len(ids) for ids in run.chunks])
        return shares([self.counts.get(ids, {}).get(self.weighing, 0.0) for ids in run.chunks])


@dataclass
class LossCoupling(Isolation):
    """A loss in which examples see each other."""

    batch_layouts: tuple[Layout, ...]
    anatomy: Mapping[str, Sequence[Anatomy]]
    where: str = "in the loss"
    cause: Cause = Cause.COUPLING
    _refused: list[str] = field(default_factory=list)

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        sizes = [len(ids) for ids in run.chunks]
        with loss_in_chunks(run.bench, self.batch_layouts, self.anatomy, sizes, self._refuse):
            yield

    def said(self) -> Sequence[str]:
        return tuple(self._refused[:1])

    def _refuse(self) -> None:
        self._refused.append(
            "the microbatches cannot be told apart in what the loss works on: it was not isolated"
        )


@dataclass
class RowsOfTheWhole(Isolation):
    """A batch that shows an example otherwise than its microbatch does: padded or normalised.

    Attributes:
        ids: the examples of the large batch, in order.
    """

    batch_layouts: tuple[Layout, ...] | None
    ids: tuple[int, ...]
    where: str
    cause: Cause = Cause.COUPLING
    _refused: list[str] = field(default_factory=list)

    @property
    def parts_too(self) -> bool:
        return True

    def part_batch(self, run: Run, whole: Any) -> Any | None:
        begin = _position(run.ids, self.ids)
        if begin is None:
            return None
        try:
            return rows_of(whole, self.batch_layouts, begin, begin + len(run.ids), len(self.ids))
        except NotCuttable:
            self._refused.append(
                "the examples cannot be told apart in what collate returns: microbatches cannot be "
                "cut from the large batch"
            )
            return None

    def said(self) -> Sequence[str]:
        return tuple(self._refused[:1])


def detect(scene: Scene, found: Sequence[Isolation]) -> list[Isolation]:
    """What couples the group's examples, beside BatchNorm.

    A loss that is a mean is no coupling but not what an experiment's loss must be.
    """
    return _detect(scene, found, by_rows=False)


def detect_by_rows(scene: Scene, found: Sequence[Isolation]) -> list[Isolation]:
    """The same where no example that is replaced shows it: an expert's capacity that is full.

    To be asked after branches, which rounding makes differ by rows as well.
    """
    return _detect(scene, found, by_rows=True)


def _detect(scene: Scene, found: Sequence[Isolation], by_rows: bool) -> list[Isolation]:
    known = [one for one in found if one.cause == Cause.COUPLING]
    partly: list[Isolation] = []
    unsolved = 0
    for lab in (Lab.few(scene), Lab.more(scene)) if len(scene.chunks) > 1 else ():
        if len(lab.chunks) < 2 or lab.separable(()):
            continue
        if lab.averages():
            return []
        search = _Search(lab, by_rows, list(known))
        search.run()
        if search.done:
            return search.found[len(known) :]
        partly = partly or search.found[len(known) :]
        unsolved = len(lab.examples)
    if unsolved and by_rows:
        scene.untold.append(_unsolved(unsolved))
    return partly


def _unsolved(examples: int) -> str:
    return (
        f"a batch of {examples} examples has not the gradient that its microbatches add up to, "
        "even without BatchNorm and with random numbers held still, and no place was found that "
        "explains it: examples were replaced one by one, each module's results were compared with "
        "those of the microbatches, and the modules that differed, and the loss, were run on one "
        "microbatch at a time. A term of the loss that each batch adds once (a penalty on "
        "parameters) looks like this too"
    )


@dataclass
class _Search:
    lab: Lab
    by_rows: bool
    found: list[Isolation]

    def run(self) -> None:
        """Isolations until the lab's examples are separable, at most ``MOST``."""
        if not any(isinstance(one, RowsOfTheWhole) for one in self.found):
            self.found += self._leaks()
        while len(self.found) < MOST and not self.done:
            following = self._next()
            if following is None:
                break
            self.found.append(following)

    @property
    def done(self) -> bool:
        return self._separable(self.found)

    def _leaks(self) -> list[Isolation]:
        where = where_padding_leaks(self.lab)
        if where is None:
            return []
        return [RowsOfTheWhole(self.lab.batch_layouts, self.lab.scene.group.flat, where)]

    def _next(self) -> Isolation | None:
        """The isolation of the next place, the innermost module that it can be isolated at."""
        entry = self._entry(())
        if entry is None:
            return self._loss()
        options = list(self._options(entry))
        right = next((one for one in options if self._separable([*self.found, one])), None)
        return right or next((one for one in options if self._entry([one]) != entry), None)

    def _entry(self, more: Sequence[Isolation]) -> Place | None:
        isolations = [*self.found, *more]
        names = [one.name for one in isolations if isinstance(one, ModuleCoupling)]
        return first_coupling(self.lab, self._on_the_lab(isolations), names, by_rows=self.by_rows)

    def _loss(self) -> Isolation | None:
        """The loss, if nothing else is left where examples can meet, and they do."""
        layouts = self.lab.batch_layouts
        if layouts is None or not couples_in_loss(self.lab, self._on_the_lab(self.found)):
            return None
        losses = [LossCoupling(layouts, anatomy) for anatomy in self._anatomies]
        return next((one for one in losses if self._separable([*self.found, one])), None)

    def _options(self, entry: Place) -> Iterator[ModuleCoupling]:
        """The module's own code, then all of it, then modules around it; for each way in which
        examples may be folded, and to put tensors without rows together."""
        terms = list(self.lab.scene.counts)
        taken = {one.name for one in self.found if isinstance(one, ModuleCoupling)}
        for (name, whole), anatomy in product(_places(entry.name), self._anatomies):
            inside = _inside(name, anatomy) if whole else None
            if name in taken or name not in anatomy or (whole and not inside):
                continue
            shared = any(one.shared for call in anatomy[name] for one in call.outputs)
            for weighing in (*terms, EXAMPLES, SUM) if shared else terms[:1]:
                where = self._where(entry, name)
                yield ModuleCoupling(name, anatomy[name], inside, weighing, self._counts, where)

    @property
    def _anatomies(self) -> Iterator[dict[str, tuple[Anatomy, ...]]]:
        """Of each module's calls, in order: examples one after the other, and in turns."""
        found: dict[str, tuple[Anatomy, ...]] = {}
        for (name, _), one in sorted(self.lab.anatomy.items()):
            found[name] = (*found.get(name, ()), one)
        yield found
        yield {name: tuple(one.interleaved() for one in calls) for name, calls in found.items()}

    def _where(self, entry: Place, isolated: str) -> str:
        if isolated == entry.name:
            return f"first {entry}"
        kind = type(self.lab.scene.bench.module.get_submodule(isolated)).__name__
        return f"first {entry}, isolated as all of {Place(isolated, kind).module}"

    @property
    def _counts(self) -> dict[tuple[int, ...], Mapping[str, float]]:
        scene = self.lab.scene
        plan = dict(zip(scene.chunks, scene.chunk_counts, strict=True))
        return {**self.lab.chunk_counts, **plan}

    def _separable(self, isolations: Sequence[Isolation]) -> bool:
        return self.lab.separable(self._on_the_lab(isolations))

    def _on_the_lab(self, isolations: Sequence[Isolation]) -> list[Isolation]:
        """The same for the lab's few examples as the large batch."""
        return [
            replace(one, ids=self.lab.examples) if isinstance(one, RowsOfTheWhole) else one
            for one in isolations
        ]


def _places(name: str) -> Iterator[tuple[str, bool]]:
    """A module with those in it left whole, then without, then those around it, the model last."""
    yield name, True
    while name:
        yield name, False
        name = name.rpartition(".")[0]
    yield "", False


def _inside(name: str, anatomy: Mapping[str, Sequence[Anatomy]]) -> dict[str, Sequence[Anatomy]]:
    """Of the modules in it, by name within it."""
    prefix = f"{name}." if name else ""
    return {
        other.removeprefix(prefix): calls
        for other, calls in anatomy.items()
        if other != name and other.startswith(prefix)
    }


def _position(part: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    starts = range(len(whole) - len(part) + 1)
    return next((at for at in starts if whole[at : at + len(part)] == part), None)
