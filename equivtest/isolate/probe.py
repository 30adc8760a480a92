"""The first module in which examples see each other.

Some of the examples of a small batch are replaced, one at a time and two at a time. An element of a
module's output that moves with either of two examples depends on both. Where examples have rows of
their own that is a coupling; of tensors that all examples share (a load-balancing term) it is one
unless the effects of the two add up. No batch axis need be known for the former: an axis is asked
for only to tell shared tensors, and tensors of pairs, from rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from equivtest.distance import wide
from equivtest.isolate.axes import Layout, fits
from equivtest.isolate.cutting import Anatomy
from equivtest.isolate.isolation import Isolation
from equivtest.isolate.lab import Lab, Seen
from equivtest.isolate.watch import by_key, tensors

REPLACED = 3
"""Examples of a batch that are replaced, one and two at a time."""

ATTEMPTS = 3
"""By how many different ones: a coupling may show with some only (those of another expert)."""

MOVED = 2.0**-40
"""Of a tensor's largest element: batches of one shape give other examples the same bits, so this
leaves room for sums whose order depends on values."""

UNKNOWN = Anatomy((), ())

Replaced = frozenset[int]
"""Positions in the batch at which another example stands."""


@dataclass(frozen=True)
class Entry:
    """Where a source enters: a module by qualified name and class, or behind all of them."""

    name: str
    kind: str
    nth: int = 0

    def __str__(self) -> str:
        if not self.name:
            return f"the model's own forward ({self.kind})"
        return f"`{self.name}` ({self.kind})"


def first_coupling(lab: Lab, isolations: Sequence[Isolation] = ()) -> Entry | None:
    """The first module whose outputs mix examples that its inputs hold apart; None if none does."""
    found = (_first(lab, isolations, attempt) for attempt in range(ATTEMPTS))
    return next((entry for entry in found if entry is not None), None)


def _first(lab: Lab, isolations: Sequence[Isolation], attempt: int) -> Entry | None:
    runs = _runs(lab, isolations, attempt)
    if len(runs) < 4:  # base, two replaced, both: without two that can be replaced there is no pair
        return None
    n = len(lab.examples)
    counts = {which: seen.counts for which, seen in runs.items()}
    calls = {which: by_key(seen.calls) for which, seen in runs.items()}
    for call in runs[frozenset()].calls:
        same = {which: found[call.key] for which, found in calls.items() if call.key in found}
        if len(same) < len(runs):
            continue  # not called in each of them
        where = lab.anatomy.get(call.key, UNKNOWN)
        inputs = {which: one.inputs for which, one in same.items()}
        outputs = {which: one.outputs for which, one in same.items()}
        if _any_mixes(outputs, where.outputs, counts, n) and not _any_mixes(
            inputs, where.inputs, counts, n
        ):
            return Entry(call.name, call.kind, call.nth)
    return None


def _runs(lab: Lab, isolations: Sequence[Isolation], attempt: int) -> dict[Replaced, Seen]:
    """The base, and with one and two examples replaced by others of a batch of the same shapes."""
    base = lab.examples
    replacing: dict[int, int] = {}
    for at in range(len(base)):
        other = _stand_in(lab, at, attempt)
        if other is not None and len(replacing) < REPLACED:
            replacing[at] = other
    which = [frozenset(c) for size in (0, 1, 2) for c in combinations(replacing, size)]
    return {
        replaced: lab.forward(
            [replacing[at] if at in replaced else i for at, i in enumerate(base)], isolations
        )
        for replaced in which
    }


def _stand_in(lab: Lab, at: int, attempt: int) -> int | None:
    """An example for the one at ``at`` with which the batch has the same shapes."""
    base = lab.examples
    own = tensors(lab.batch(base))
    others = [i for i in lab.others if i != base[at]]
    first = (at + attempt * REPLACED) % max(len(others), 1)
    for other in (*others[first:], *others[:first]):
        made = tensors(lab.batch([*base[:at], other, *base[at + 1 :]]))
        same_shapes = [t.shape for t in made] == [t.shape for t in own]
        if same_shapes and not all(map(torch.equal, made, own)):
            return other
    return None


def _any_mixes(
    found: Mapping[Replaced, tuple[Tensor, ...]],
    layouts: Sequence[Layout],
    counts: Mapping[Replaced, Mapping[str, float]],
    n: int,
) -> bool:
    lengths = {len(leaves) for leaves in found.values()}
    if len(lengths) != 1:
        return False
    leaves = lengths.pop()
    if len(layouts) != leaves:
        layouts = [Layout(known=False)] * leaves
    return any(
        _mixes({which: tensors[t] for which, tensors in found.items()}, layouts[t], counts, n)
        for t in range(leaves)
    )


def _mixes(
    found: Mapping[Replaced, Tensor],
    layout: Layout,
    counts: Mapping[Replaced, Mapping[str, float]],
    n: int,
) -> bool:
    """Some element depends on two examples, otherwise than by adding up what is of each."""
    base = found[frozenset()]
    if any(x.shape != base.shape for x in found.values()) or base.numel() == 0:
        return False  # packed otherwise: its rows are not the same examples'
    pairs = [tuple(which) for which in found if len(which) == 2]
    if layout.shared:
        return not any(
            all(_adds_up(weighted, a, b) for a, b in pairs) for weighted in _weighted(found, counts)
        )
    by_one = {
        at: moved(found[frozenset({at})], base) for at in {at for pair in pairs for at in pair}
    }
    return any(bool(_but_pairs(by_one[a] & by_one[b], layout, n).any()) for a, b in pairs)


def _weighted(
    found: Mapping[Replaced, Tensor], counts: Mapping[Replaced, Mapping[str, float]]
) -> list[Mapping[Replaced, Tensor]]:
    """The tensors, and times each of the loss's counts: a mean over those adds up so."""
    terms = counts[frozenset()]
    return [
        found,
        *({which: x * counts[which].get(t, 0.0) for which, x in found.items()} for t in terms),
    ]


def _adds_up(found: Mapping[Replaced, Tensor], a: int, b: int) -> bool:
    """The effect of replacing two is the sum of the effects of replacing each."""
    four = [found[frozenset(s)] for s in ((), (a,), (b,), (a, b))]
    if all(torch.equal(x, four[0]) for x in four[1:]):
        return True
    none, one, other, both = map(_wide, four)
    largest = max(float(x.abs().max()) for x in (none, one, other, both))
    return bool(((both - one - other + none).abs() <= 4 * MOVED * largest).all())


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
