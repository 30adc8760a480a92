"""The first module in which examples see each other.

Some of the examples of a small batch are replaced, one at a time: where examples have rows of their
own, an element of a module's output that moves with either of two examples mixes them. No batch
axis need be known for that, wherever it stands and whatever is folded into it. A tensor that all
examples share (a load-balancing term) mixes them unless it is the sum, or a weighted mean, of what
the microbatches give by themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from equivtest.distance import wide
from equivtest.isolate.calls import Call, by_key, tensors
from equivtest.isolate.cut.axes import Layout, fits
from equivtest.isolate.cut.modules import Anatomy
from equivtest.isolate.isolation import Isolation
from equivtest.isolate.places import Place
from equivtest.isolate.probe.lab import Lab, Seen

REPLACED = 3
"""Examples of a batch that are replaced, each on its own."""

STAND_INS = 2
"""By how many others: a coupling may show with some only."""

MOVED = 2.0**-40
"""Of a tensor's largest element: batches of one shape give other examples the same bits, so this
leaves room for sums whose order depends on values."""

ADDS_UP = 1e-9
"""The same between a batch and its microbatches, whose kernels round otherwise."""

UNKNOWN = Anatomy((), ())

Calls = Mapping[tuple[str, int], Call]


def first_coupling(
    lab: Lab, isolations: Sequence[Isolation] = (), isolated: Sequence[str] = ()
) -> Place | None:
    """The first module whose outputs mix examples that its inputs hold apart; None if none does.

    Args:
        isolations: entered around the forwards.
        isolated: modules that run in microbatches for them; those inside are not looked at.
    """
    rows, shared = _Rows.of(lab, isolations), _Shared.of(lab, isolations)
    for call in rows.calls:
        if any(call.place.name != name and _is_in(call.place.name, name) for name in isolated):
            continue
        where = lab.anatomy.get(call.key, UNKNOWN)
        mixed = rows.mixes(call, "outputs", where.outputs) or shared.mixes(call, where.outputs)
        if mixed and not rows.mixes(call, "inputs", where.inputs):
            return call.place
    return None


def couples_in_loss(lab: Lab, isolations: Sequence[Isolation] = ()) -> bool:
    """What one example is replaced by changes what another's replacement does to the loss.

    A mean over the batch, or a term that each batch adds once, is no sum over examples either, and
    no two of them meet in it.
    """
    base = list(lab.examples)
    replacing = {at: ids[0][at] for at in range(len(base)) if (ids := _with_another(lab, at))}

    def seen(*replaced: int) -> Seen:
        ids = [replacing[at] if at in replaced else i for at, i in enumerate(base)]
        return lab.forward([(i,) for i in ids], isolations)

    none = seen()
    one = {at: seen(at) for at in list(replacing)[:REPLACED]}
    return any(_interact(none, one[a], one[b], seen(a, b)) for a, b in combinations(one, 2))


def _interact(none: Seen, a: Seen, b: Seen, both: Seen) -> bool:
    """The two replacements' effects do not add up in some term, times its count neither."""
    runs = (both, a, b, none)
    for term in none.totals:
        sums = [run.totals[term] for run in runs]
        means = [run.totals[term] * run.counts[term] for run in runs]
        if not any(_cancels(*four) for four in (sums, means)):
            return True
    return False


def _cancels(both: float, a: float, b: float, none: float) -> bool:
    return abs(both - a - b + none) <= 4 * MOVED * max(map(abs, (both, a, b, none)))


def _is_in(name: str, module: str) -> bool:
    return not module or name == module or name.startswith(f"{module}.")


@dataclass(frozen=True)
class _Rows:
    """A forward of ``n`` examples, and others by the position of the example that is replaced."""

    n: int
    calls: tuple[Call, ...]
    replaced: Mapping[int, Sequence[Calls]]

    @classmethod
    def of(cls, lab: Lab, isolations: Sequence[Isolation]) -> _Rows:
        base = lab.examples

        def calls(ids: Sequence[int]) -> tuple[Call, ...]:
            return lab.forward([(i,) for i in ids], isolations).calls

        batches = {at: _with_another(lab, at) for at in range(len(base))}
        chosen = [at for at, others in batches.items() if others][:REPLACED]
        replaced = {at: [by_key(calls(ids)) for ids in batches[at]] for at in chosen}
        return cls(len(base), calls(base), replaced)

    def mixes(self, call: Call, side: str, layouts: Sequence[Layout]) -> bool:
        """Some element of its inputs or outputs moves with either of two examples."""
        base: tuple[Tensor, ...] = getattr(call, side)
        if len(layouts) != len(base):
            layouts = [Layout(known=False)] * len(base)
        return any(
            self._mixed(call, side, t, layout)
            for t, layout in enumerate(layouts)
            if not layout.shared
        )

    def _mixed(self, call: Call, side: str, t: int, layout: Layout) -> bool:
        moved_by = [self._moved(call, side, t, others) for others in self.replaced.values()]
        known = [one for one in moved_by if one is not None]
        return any(bool(_but_pairs(a & b, layout, self.n).any()) for a, b in combinations(known, 2))

    def _moved(self, call: Call, side: str, t: int, others: Sequence[Calls]) -> Tensor | None:
        """By element, whether another example in one place moves it; None if packed otherwise."""
        base: tuple[Tensor, ...] = getattr(call, side)
        result = torch.zeros_like(base[t], dtype=torch.bool)
        for calls in others:
            tensors: Sequence[Tensor] = getattr(calls[call.key], side) if call.key in calls else ()
            if len(tensors) != len(base) or tensors[t].shape != base[t].shape:
                return None  # its rows are not the same examples'
            result |= moved(tensors[t], base[t])
        return result


def _with_another(lab: Lab, at: int) -> list[list[int]]:
    """Batches of the same shapes with another example at ``at``."""
    base = list(lab.examples)
    own = tensors(lab.batch(base))
    found: list[list[int]] = []
    for other in (*lab.others[at + 1 :], *lab.others[: at + 1]):
        ids = [*base[:at], other, *base[at + 1 :]]
        made = tensors(lab.batch(ids))
        same_shapes = [t.shape for t in made] == [t.shape for t in own]
        if same_shapes and not all(map(torch.equal, made, own)):
            found.append(ids)
        if len(found) == STAND_INS:
            break
    return found


@dataclass(frozen=True)
class _Shared:
    """A forward of microbatches in one batch, and one of each."""

    whole: Calls
    parts: Sequence[Calls]
    weights: Sequence[Sequence[float]]

    @classmethod
    def of(cls, lab: Lab, isolations: Sequence[Isolation]) -> _Shared:
        whole = lab.forward(lab.chunks, isolations)
        parts = [
            lab.forward([chunk], isolations, batch)
            for chunk, batch in zip(lab.chunks, lab.part_batches(isolations), strict=True)
        ]
        sizes = [[float(len(chunk)) for chunk in lab.chunks]]
        sizes += [[part.counts.get(term, 0.0) for part in parts] for term in whole.counts]
        means = [[size / sum(each) for size in each] for each in sizes if sum(each) > 0]
        weights = [[1.0] * len(parts), *means]
        return cls(by_key(whole.calls), [by_key(part.calls) for part in parts], weights)

    def mixes(self, call: Call, layouts: Sequence[Layout]) -> bool:
        """Some output without rows is neither the sum nor a mean of the microbatches'."""
        calls = [calls.get(call.key) for calls in (self.whole, *self.parts)]
        outputs = [one.outputs for one in calls if one is not None]
        if len(outputs) < len(calls) or {len(each) for each in outputs} != {len(layouts)}:
            return False
        return any(
            layout.shared and not self._adds_up([each[t] for each in outputs])
            for t, layout in enumerate(layouts)
        )

    def _adds_up(self, tensors: Sequence[Tensor]) -> bool:
        whole, *parts = tensors
        if not whole.is_floating_point() or any(part.shape != whole.shape for part in parts):
            return True  # no gradient goes through it; or a shape of its own, to be seen in its use
        return any(
            not bool(moved(_sum(parts, weights), whole, ADDS_UP).any()) for weights in self.weights
        )


def _sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.stack([part * weight for part, weight in zip(parts, weights, strict=True)]).sum(0)


def moved(x: Tensor, base: Tensor, tolerance: float = MOVED) -> Tensor:
    """By element, whether it is another, by more than ``tolerance`` of the base's largest."""
    same = (x == base) | ((x != x) & (base != base))
    size = _wide(base).abs()
    largest = float(size[size.isfinite()].max()) if size.isfinite().any() else 0.0
    return ~(same | ((_wide(x) - _wide(base)).abs() <= tolerance * largest))


def _but_pairs(mixed: Tensor, layout: Layout, n: int) -> Tensor:
    """Without the elements that stand for two different ones of the ``n`` examples."""
    if len(layout.axes) < 2 or not fits(mixed, layout, n):
        return mixed
    first, second = (
        _owners(mixed.shape[axis], n, layout.minor).view([-1] + [1] * (mixed.ndim - 1 - axis))
        for axis in layout.axes[:2]
    )
    return mixed & (first == second).to(mixed.device)


def _owners(size: int, n: int, minor: bool) -> Tensor:
    """Which example each index of a batch axis belongs to."""
    at = torch.arange(size)
    return at % n if minor else at // (size // n)


def _wide(x: Tensor) -> Tensor:
    return x.to(wide(x.dtype))
