"""The first module in which examples see each other.

Some of the examples of a small batch are replaced, one at a time: where examples have rows of their
own, an element of a module's output that moves with either of two examples mixes them. No batch
axis need be known for that, wherever it stands and whatever is folded into it. A tensor that all
examples share (a load-balancing term) mixes them unless it is the sum, or a weighted mean, of what
the microbatches give by themselves.

Replacing a few examples may change nothing that others see (an expert's capacity is full or not).
Where that names no module, rows can be compared with what the microbatches give by themselves;
rounding that flips a branch makes them differ as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from equivtest.distance import wide
from equivtest.isolate.calls import Call, by_key, tensors
from equivtest.isolate.cut.axes import Layout, fits, rows
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
    lab: Lab,
    isolations: Sequence[Isolation] = (),
    isolated: Sequence[str] = (),
    *,
    by_rows: bool = False,
) -> Place | None:
    """The first module whose outputs mix examples that its inputs hold apart; None if none does.

    Args:
        isolations: entered around the forwards.
        isolated: modules that run in microbatches for them; those inside are not looked at.
        by_rows: where that names none, compare rows with the microbatches' own.
    """
    singly, parts = _Rows.of(lab, isolations), _Parts.of(lab, isolations)

    def mixes(call: Call, where: Anatomy) -> bool:
        mixed = singly.mixes(call, "outputs", where.outputs) or parts.mix(call, where.outputs)
        return mixed and not singly.mixes(call, "inputs", where.inputs)

    for found in (mixes, parts.first_differ) if by_rows else (mixes,):
        for call in singly.calls:
            at = call.place.name
            inside = any(at != name and _is_in(at, name) for name in isolated)
            if not inside and found(call, lab.anatomy.get(call.key, UNKNOWN)):
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
class _Parts:
    """A forward of microbatches in one batch, and one of each, of ``sizes`` examples."""

    whole: Calls
    parts: Sequence[Calls]
    sizes: Sequence[int]
    weights: Sequence[Sequence[float]]

    @classmethod
    def of(cls, lab: Lab, isolations: Sequence[Isolation]) -> _Parts:
        whole = lab.forward(lab.chunks, isolations)
        parts = [
            lab.forward([chunk], isolations, batch)
            for chunk, batch in zip(lab.chunks, lab.part_batches(isolations), strict=True)
        ]
        sizes = [[float(len(chunk)) for chunk in lab.chunks]]
        sizes += [[part.counts.get(term, 0.0) for part in parts] for term in whole.counts]
        means = [[size / sum(each) for size in each] for each in sizes if sum(each) > 0]
        weights = [[1.0] * len(parts), *means]
        calls = [by_key(part.calls) for part in parts]
        return cls(by_key(whole.calls), calls, [len(chunk) for chunk in lab.chunks], weights)

    def mix(self, call: Call, layouts: Sequence[Layout]) -> bool:
        """Some output without rows is neither the sum nor a mean of the microbatches'."""
        return any(
            layout.shared and not self._adds_up(tensors)
            for layout, tensors in zip(layouts, self._tensors(call, "outputs"), strict=False)
        )

    def first_differ(self, call: Call, where: Anatomy) -> bool:
        """Rows of its outputs are not the microbatches' own, and those of its inputs are."""
        outputs = zip(where.outputs, self._tensors(call, "outputs"), strict=False)
        floating = [(layout, each) for layout, each in outputs if each[0].is_floating_point()]
        if not any(not layout.shared and self._apart(layout, each) for layout, each in floating):
            return False
        inputs = self._tensors(call, "inputs")
        return len(inputs) == len(where.inputs) and all(
            self._apart(layout, each) is False
            for layout, each in zip(where.inputs, inputs, strict=True)
        )

    def _tensors(self, call: Call, side: str) -> list[list[Tensor]]:
        """The call's, each with the microbatches' behind it; none where those have others."""
        calls = [calls.get(call.key) for calls in (self.whole, *self.parts)]
        held: list[Sequence[Tensor]] = [getattr(one, side) for one in calls if one is not None]
        if len(held) < len(calls) or len({len(each) for each in held}) > 1:
            return []
        return [list(each) for each in zip(*held, strict=True)]

    def _apart(self, layout: Layout, tensors: Sequence[Tensor]) -> bool | None:
        """However examples are folded, some microbatch's rows are others; None if not known."""
        read = [self._rows_apart(one, tensors) for one in (layout, layout.interleaved())]
        known = [apart for apart in read if apart is not None]
        return all(known) if known else None

    def _rows_apart(self, layout: Layout, tensors: Sequence[Tensor]) -> bool | None:
        whole, *parts = tensors
        n, begin, apart = sum(self.sizes), 0, False
        if not fits(whole, layout, n):
            return None
        for part, size in zip(parts, self.sizes, strict=True):
            own = rows(whole, layout, n, begin, begin + size)
            if own.shape != part.shape:
                return None
            apart = apart or bool(moved(part, own, ADDS_UP).any())
            begin += size
        return apart

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
