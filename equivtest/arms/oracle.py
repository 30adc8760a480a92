"""Oracle, large batch and the runs that tell their noise: one process, whole groups."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivtest.arms.bench import Bench, Factor, Pass
from equivtest.arms.build import seed_everything
from equivtest.arms.replay import Around, nothing
from equivtest.batches import Batches, Counts, agree, denominator
from equivtest.calling import ExperimentError, calling
from equivtest.distance import (
    accumulate,
    bytes_of,
    dense,
    difference,
    distance,
    finite,
    norms,
    wide,
)
from equivtest.observe.rng import RandomState
from equivtest.observe.trace import State, Tensors
from equivtest.outofmemory import LARGE_BATCH

Sum = list[Tensor | None]
"""A gradient in float64, by position in ``Bench.names``."""

PERMUTATIONS = 4
JITTERS = 2
NUDGES = 8
FIXED_SPLIT = 4

NULL = 1e-6
"""Float64 rounding over scale beyond which a gradient is zero in exact arithmetic. Real tensors
showed at most 1e-12, null ones 1e-3 and more."""


@dataclass(frozen=True)
class Cut:
    """A group as a sum over parts: its gradient, the sum of the parts' norms by tensor, its loss.

    The gradient is held in float64, and the loss is normalised.
    """

    gradients: Sum
    scale: list[float]
    loss: float

    @property
    def held_bytes(self) -> int:
        return bytes_of(self.gradients)


@dataclass
class Whole:
    """One group on one bench: the large-batch gradient and other ways to compute the same.

    On a float64 bench this is the oracle; in the case's precision it is the large batch.

    Attributes:
        counts: supervised elements of the group by term: what the loss is divided by.
        loss_scale: a factor on the loss that is taken out of the gradients again.
        counted_by: what gave ``counts``, as users call it.
        note: told that a whole group runs, where it survives the death of this process.
        around: entered around each forward and backward.
    """

    bench: Bench
    batches: Batches
    state: State
    ids: tuple[int, ...]
    counts: Counts
    loss_scale: float = 1.0
    counted_by: str = "count"
    note: Callable[[str], None] = lambda _: None
    around: Around = nothing
    _runs: dict[tuple[object, ...], Sum] = field(default_factory=dict)
    _cuts: dict[tuple[tuple[int, ...], ...], Cut] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        """Bytes of the state, and of a float64 gradient for each run that is kept."""
        parameters = list(self.state.parameters.values())
        state = bytes_of([*parameters, *self.state.buffers.values()])
        runs = 1 + len(self._runs) + len(self._cuts)
        return state + runs * 8 * sum(p.numel() for p in parameters)

    @cached_property
    def _large(self) -> Pass:
        return self._run(self.ids)

    @cached_property
    def gradients(self) -> Sum:
        """The gradient of the whole group in one batch."""
        return self._unscaled(self._large)

    @cached_property
    def loss(self) -> float:
        """The loss of the whole group, normalised."""
        return self._large.weighed(self.counts)

    def check(self) -> None:
        """The loss has a graph, and counts on the whole what the parts add up to.

        Raises:
            ExperimentError: it raised, has none, or other counts.
        """
        with calling("loss", self._called):
            large = self._large
        if not large.attached:
            raise ExperimentError(
                f"Loss.total has no graph on {self._called}, so there is nothing to go backward "
                "through: sum what the model gives, without .detach(), .item() or no_grad"
            )
        counted = large.counted()
        for term, value in self.counts.items():
            if term not in counted:
                raise ExperimentError(
                    f"count has the term {term!r}, and the loss has {sorted(counted)}: use the "
                    "same terms in both"
                )
            if not agree(counted[term], value, len(self.ids)):
                name = f" of term {term!r}" if term else ""
                raise ExperimentError(
                    f"{self.counted_by}{name} adds up to {value:g} over the microbatches, and the "
                    f"loss counts {counted[term]:g} on the same {len(self.ids)} examples in one "
                    f"batch: {self.counted_by} must give the supervised elements that Loss.count "
                    "gives, for any split"
                )

    def check_finite(self) -> None:
        """Neither the loss nor its gradient is NaN or infinite.

        Raises:
            ExperimentError: one is: it is the experiment's own, whatever the loop.
        """
        for total in self._large.totals:
            if not math.isfinite(total):
                raise ExperimentError(
                    f"Loss.total is {total} on {self._called}{self._odd_input()}: no loop is to "
                    "blame; look for log(0), 0/0 or an overflow in the model and the loss"
                )
        for name, right in zip(self.bench.names, finite(self.gradients), strict=True):
            if not right:
                raise ExperimentError(
                    f"the gradient of {name!r} is not finite on {self._called}, though the loss "
                    "is: no loop is to blame; look for a square root or a norm at 0 in the model "
                    "and the loss"
                )

    @property
    def finite(self) -> bool:
        """Loss and gradient are finite."""
        return all(map(math.isfinite, self._large.totals)) and all(finite(self.gradients))

    @property
    def _called(self) -> str:
        dtype = str(self.bench.dtype).removeprefix("torch.")
        return f"all {len(self.ids)} examples of an update in one batch in {dtype}"

    def _odd_input(self) -> str:
        """Which examples hold NaN or inf themselves, in a clause."""
        odd = [i for i in self.ids if not all(finite(_floats(self.batches((i,)))))]
        shown = ", ".join(map(str, odd[:4]))
        return f" (NaN or inf in example {shown} itself)" if odd else ""

    @cached_property
    def drew(self) -> bool:
        """The forward draws random numbers."""
        self._prepare(self.state.parameters)
        before = RandomState.now()
        self.bench.run(self.batches(self.ids), lambda *_: None)
        return before.moved()

    @cached_property
    def repeatable(self) -> bool:
        """The same run again gives the same bits; if not, nothing that differs is evidence."""
        again = self._run(self.ids)
        return again.totals == self._large.totals and not any(
            difference(self._unscaled(again), self.gradients)
        )

    def permuted(self, k: int) -> Sum:
        """The same with the examples in another, fixed order."""
        return self._once(("permuted", k), lambda: self._unscaled(self._run(self._order(k))))

    def jittered(self, k: int) -> Sum:
        """The same with every parameter moved by up to a unit in its last place."""
        return self._once(("jittered", k), lambda: self._unscaled(self._jittered_run(k)))

    def jittered_loss(self, k: int) -> float:
        """The normalised loss of ``jittered``."""
        return self._jittered_run(k).weighed(self.counts)

    def third(self) -> Sum:
        """The same with the loss times 1/3, taken out again: moves every rounding."""
        return self._once(
            ("third",), lambda: self._unscaled(self._run(self.ids, 1.0 / 3.0), 1.0 / 3.0)
        )

    def split(self, size: int) -> Sum:
        """The same as a sum over parts of ``size`` examples, one after the other."""
        return self.cut(self._parts_of(size)).gradients

    def example(self, i: int) -> Sum:
        """The share of one example: its own gradient, over the counts of the whole."""
        return self._unscaled(self._run((i,)))

    def cut(self, parts: tuple[tuple[int, ...], ...]) -> Cut:
        """The same as a sum over ``parts``, each from the state that the whole starts from."""
        if parts not in self._cuts:
            self._cuts[parts] = self._cut(parts)
        return self._cuts[parts]

    @cached_property
    def scale(self) -> list[float]:
        """``S_t``: by tensor, the sum of the norms of the parts' gradients.

        Parts are single examples, or, where a model refuses those or its examples see each other,
        fixed parts of four (a last one of five): the same for every plan of the group.
        """
        return self._scale[0]

    @cached_property
    def coupled(self) -> bool:
        """Single examples do not add up to the whole, or cannot be run: they see each other."""
        return self._scale[1]

    @cached_property
    def _scale(self) -> tuple[list[float], bool]:
        """``scale`` and ``coupled``."""
        fixed = self._fixed_parts()
        try:
            single = self.cut(self._parts_of(1))
        except Exception:
            # torch refuses a single example (BatchNorm1d in training mode), or the user's own code
            # does: an assertion, a division by the number of other examples.
            return self.cut(fixed).scale, True
        if not all(map(math.isfinite, single.scale)):  # a variance of one example
            return self.cut(fixed).scale, True
        # A loss over pairs is zero on single examples: then the whole gradient is what to go by.
        sizes = [max(s, n) for s, n in zip(single.scale, norms(self.gradients), strict=True)]
        moved = difference(single.gradients, self.gradients)
        if any(
            d > NULL * s > 0 and not self.unsteady(t, s)
            for t, (d, s) in enumerate(zip(moved, sizes, strict=True))
        ):
            return self.cut(fixed).scale, True
        return single.scale, False

    def unsteady(self, tensor: int, scale: float) -> bool:
        """Rounding alone moves this tensor by more than ``NULL`` of ``scale``.

        The loss times 1/3, then parameters moved in their last bits, until one moves it: mere noise
        takes few values (that of a scalar is a small multiple of one unit in the last place), and
        comes out the same in any two runs now and then. Neither permutations nor splits are asked:
        what depends on the order of examples, or on how they are cut, is not rounding.
        """
        nudges: list[Callable[[], Sum]] = [
            self.third,
            *(partial(self.jittered, k) for k in range(NUDGES)),
        ]
        return any(distance(run()[tensor], self.gradients[tensor]) > NULL * scale for run in nudges)

    def _parts_of(self, size: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.ids[i : i + size] for i in range(0, len(self.ids), size))

    def _fixed_parts(self) -> tuple[tuple[int, ...], ...]:
        """Parts of four; a last example alone, which a model may refuse, joins those before it."""
        *parts, last = self._parts_of(FIXED_SPLIT)
        return (*parts[:-1], parts[-1] + last) if parts and len(last) == 1 else (*parts, last)

    def _cut(self, parts: Sequence[tuple[int, ...]]) -> Cut:
        total: Sum = [None] * len(self.bench.names)
        scale = [0.0] * len(total)
        loss = 0.0
        for ids in parts:
            run = self._run(ids)
            part = self._unscaled(run)
            accumulate(total, part)
            scale = [s + n for s, n in zip(scale, norms(part), strict=True)]
            loss += run.weighed(self.counts)
        return Cut(total, scale, loss)

    def _order(self, k: int) -> tuple[int, ...]:
        order = list(self.ids)
        random.Random(k).shuffle(order)
        return tuple(order)

    def _run(self, ids: Sequence[int], factor: float = 1.0) -> Pass:
        self.note(f"{LARGE_BATCH} {len(ids)} examples" if len(ids) == len(self.ids) else "a part")
        self._prepare(self.state.parameters)
        with self.around(ids):
            return self.bench.run(self.batches(ids), self._factor(factor))

    def _prepare(self, parameters: Tensors) -> None:
        self.bench.load(parameters, self.state.buffers)
        seed_everything(0)  # a forward that draws numbers must still give the same bits twice

    def _jittered_run(self, k: int) -> Pass:
        generator = torch.Generator().manual_seed(k)
        eps = torch.finfo(self.bench.dtype).eps
        real = self.bench.dtype
        moved = {
            name: p.to(real.to_complex() if p.is_complex() else real, copy=True)
            for name, p in self.state.parameters.items()
        }
        for p in moved.values():
            units = torch.randint(-2, 3, p.shape, generator=generator)
            p.add_(p * units.to(p), alpha=eps / 2)
        self._prepare(moved)
        with self.around(self.ids):
            return self.bench.run(self.batches(self.ids), self._factor(1.0))

    def _factor(self, extra: float) -> Factor:
        def factor(_: int, term: str | None, __: torch.dtype) -> float | None:
            if term is None:
                return None
            return self.loss_scale * extra / denominator(self.counts, term)

        return factor

    def _unscaled(self, run: Pass, extra: float = 1.0) -> Sum:
        inverse = 1.0 / (self.loss_scale * extra)
        return [None if g is None else dense(g).to(wide(g.dtype)) * inverse for g in run.gradients]

    def _once(self, key: tuple[object, ...], run: Callable[[], Sum]) -> Sum:
        if key not in self._runs:
            self._runs[key] = run()
        return self._runs[key]


def _floats(batch: Any) -> list[Tensor]:
    leaves = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
