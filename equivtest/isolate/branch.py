"""``source.branch``: rounding that flips a branch.

Kernels of another shape round otherwise, and where an operator's input lies at a tie (a
pre-activation that is zero but for rounding, two equal candidates for a maximum) the large batch
decides it the other way. Isolated by imposing the split's decisions on the large batch: inputs of
deciding operators that differ from the split's by rounding are replaced by them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from equivtest.causes import Cause
from equivtest.isolate.cut.parts import common, find
from equivtest.isolate.deciding import Decision, deciding, flipped
from equivtest.isolate.isolation import Isolation, Run, entered
from equivtest.isolate.scene import Scene

ROUNDING = 2.0**-30
"""Of a tensor's largest element: a difference of inputs up to which it is rounding."""

MOST_BYTES = 1 << 30
"""What the inputs of deciding operators may take that are kept of one group."""

Inputs = tuple[Tensor, ...]


@dataclass
class Branches(Isolation):
    """Decisions that the large batch makes the other way than the microbatches.

    Attributes:
        imposed: by operator, in order, the microbatches' inputs as the large batch has them; None
            where they are not alike.
    """

    imposed: Sequence[Inputs | None]
    where: str
    cause: Cause = Cause.BRANCH

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        following = iter(self.imposed)

        def given(decision: Decision) -> Sequence[Tensor]:
            imposed = next(following, None)
            return decision.inputs if imposed is None else _snapped(decision.inputs, imposed)

        with deciding(run.module, given):
            yield


def detect(scene: Scene, found: Sequence[Isolation]) -> list[Isolation]:
    """Operators that decide otherwise in the large batch, by inputs that differ by rounding."""
    if len(scene.chunks) < 2:
        return []
    whole = _decisions(scene, found, scene.group.flat)
    parts = [_decisions(scene, found, chunk) for chunk in scene.chunks]
    if whole is None or any(one is None or len(one) != len(whole) for one in parts):
        return []
    sizes = [len(chunk) for chunk in scene.chunks]
    imposed = [
        _as_one(decision, [one[i] for one in parts if one is not None], sizes)
        for i, decision in enumerate(whole)
    ]
    places = [
        f"{decision.place}: {decision.name}"
        for decision, inputs in zip(whole, imposed, strict=True)
        if inputs is not None and flipped(decision, _snapped(decision.inputs, inputs))
    ]
    return [Branches(imposed, f"first {places[0]}")] if places else []


def _decisions(
    scene: Scene, found: Sequence[Isolation], ids: Sequence[int]
) -> list[Decision] | None:
    """Those of one forward, with what was found before isolated; None if they take too much."""
    kept: list[Decision] = []
    held = 0

    def given(decision: Decision) -> Sequence[Tensor]:
        nonlocal held
        held += sum(x.numel() * x.element_size() for x in decision.inputs)
        if held <= MOST_BYTES:
            kept.append(decision.kept())
        return decision.inputs

    run, bench, start = scene.run(ids), scene.bench, scene.start
    bench.load(start.parameters, start.buffers[0])
    with (
        torch.enable_grad(),
        entered(found, run, whole=run.ids == scene.group.flat),
        deciding(run.module, given),
    ):
        bench.losses(scene.part_batch(found, ids))
    return kept if held <= MOST_BYTES else None


def _as_one(decision: Decision, parts: Sequence[Decision], sizes: Sequence[int]) -> Inputs | None:
    """The parts' inputs put together as the whole's are; None where they are not alike."""
    if any(len(part.inputs) != len(decision.inputs) for part in parts):
        return None
    joined = []
    for t, whole in enumerate(decision.inputs):
        own = [part.inputs[t] for part in parts]
        if all(x.shape == whole.shape and torch.equal(x, own[0]) for x in own):
            joined.append(own[0])  # shared by all examples
            continue
        found = find(whole, own, sizes)
        if found is None:
            return None
        joined.append(found.joined(list(map(_over, found.cut(whole), own))))
    return tuple(joined)


def _over(whole: Tensor, own: Tensor) -> Tensor:
    """A microbatch's own values in place of those it has in the large batch.

    Padded to its own longest example it is shorter: what lies beyond stays.
    """
    result = whole.clone()
    block, own = common(result, own)
    block.copy_(own)
    return result


def _snapped(inputs: Sequence[Tensor], imposed: Sequence[Tensor]) -> Inputs:
    """The imposed values where they differ by rounding, the gradient going on as before."""
    return tuple(map(_snap, inputs, imposed))


def _snap(x: Tensor, to: Tensor) -> Tensor:
    if x.shape != to.shape:
        return x
    value = x.detach()
    near = (value - to).abs() <= ROUNDING * to.abs().max()
    return torch.where(near, to + (x - value), x)
