"""``source.batchnorm``: statistics of a microbatch in place of those of the large batch.

Isolated by a large batch in which every use of the batch's statistics is made microbatch by
microbatch, the gradient going through the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.isolate.cut.parts import Parts, find
from equivtest.isolate.isolation import Isolation, Run
from equivtest.isolate.normalising import Use, normalising
from equivtest.isolate.probe.still import still
from equivtest.isolate.scene import Scene
from equivtest.observe.rng import RandomState

Chunks = tuple[tuple[int, ...], ...]


@dataclass
class BatchStatistics(Isolation):
    """The uses that a forward makes of the statistics of its batch.

    Attributes:
        scene: whose batches they are.
    """

    scene: Scene
    where: str = ""
    cause: Cause = Cause.BATCHNORM
    _parts: dict[Chunks, list[Parts | None]] = field(default_factory=dict)
    _uncut: list[str] = field(default_factory=list)

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        if len(run.chunks) < 2:
            yield
            return
        parts = self._parts_in(run)
        seen: dict[object, Parts | None] = {}

        def handle(use: Use) -> Tensor:
            # Uses beyond those of a forward are recomputed under activation checkpointing.
            key = _fingerprint(use.input)
            own = parts[use.number] if use.number < len(parts) else seen.get(key)
            seen[key] = own
            if own is None or not own.fits(use.input):  # a microbatch of what runs in microbatches
                return use.normalised(use.input)
            return own.joined([use.normalised(rows) for rows in own.cut(use.input)])

        with normalising(run.module, handle):
            yield

    def said(self) -> Sequence[str]:
        return self._uncut

    def _parts_in(self, run: Run) -> list[Parts | None]:
        """Where the run's microbatches lie in the input of each use."""
        if run.chunks not in self._parts:
            self._parts[run.chunks] = self._found(run, _uses(self.scene, run))
        return self._parts[run.chunks]

    def _found(self, run: Run, uses: Sequence[Use]) -> list[Parts | None]:
        fixed = [_statistics(use.input) for use in uses]
        by_chunk = [_uses(self.scene, run, chunk, fixed) for chunk in run.chunks]
        if any(len(own) != len(uses) for own in by_chunk):
            self._say(f"the large batch makes {len(uses)} of them, a microbatch {len(by_chunk[0])}")
            return [None] * len(uses)
        sizes = [len(chunk) for chunk in run.chunks]
        found = [
            find(use.input, [own[use.number].input for own in by_chunk], sizes) for use in uses
        ]
        for use, parts in zip(uses, found, strict=True):
            if parts is None:
                self._say(f"no axis of {tuple(use.input.shape)} at {use.place} holds the examples")
        return found

    def _say(self, why: str) -> None:
        text = f"not every use of the batch's statistics could be isolated: {why}"
        if text not in self._uncut:
            self._uncut.append(text)


def detect(scene: Scene, found: Sequence[Isolation]) -> list[Isolation]:
    """A forward of the group that uses the statistics of its batch, where the plan cuts it."""
    if len(scene.chunks) < 2:
        return []
    state = scene.oracle.state
    scene.bench.load(state.parameters, state.buffers)
    uses = _uses(scene, scene.run(scene.group.flat))
    if not uses:
        return []
    places = list(dict.fromkeys(use.place for use in uses))
    more = f", and {len(places) - 1} more" if len(places) > 1 else ""
    return [BatchStatistics(scene, f"first {places[0]}{more}")]


def _uses(
    scene: Scene,
    run: Run,
    ids: Sequence[int] | None = None,
    fixed: Sequence[tuple[Tensor, Tensor]] | None = None,
) -> list[Use]:
    """The uses of one forward, which leaves the model and the random numbers as they were.

    Random operators draw constants, so that the same examples come out alike in any batch.

    Args:
        ids: the examples; all of the run if left out.
        fixed: mean and variance to normalise each use by instead; the examples do not see each
            other then. Those of the batch itself, as constants, if left out.
    """
    uses: list[Use] = []

    def handle(use: Use) -> Tensor:
        uses.append(use.kept())
        given = fixed[use.number] if fixed and use.number < len(fixed) else _statistics(use.input)
        return use.by_fixed(*given)

    random, buffers = RandomState.now(), run.bench.buffers()
    with still(), normalising(run.module, handle):
        run.bench.losses(scene.batches(run.ids if ids is None else ids))
    run.bench.load_buffers(buffers)
    random.restore()
    return uses


def _statistics(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance by channel."""
    axes = [axis for axis in range(rows.ndim) if axis != 1]
    variance, mean = torch.var_mean(rows.detach(), axes, correction=0)
    return mean, variance


def _fingerprint(rows: Tensor) -> object:
    """Equal for equal tensors, and hardly for others."""
    values = rows.detach()
    return values.shape, float(values.sum()), float(values.square().sum())
