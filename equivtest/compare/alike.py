"""Tensors that ranks hold alike, as one object: what is compared once need not be again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from equivtest.observe.snapshot import same_bits
from equivtest.observe.trace import State, Trace, UpdateTrace

T = TypeVar("T", Tensor, Tensor | None)


def alike(traces: Sequence[Trace]) -> list[Trace]:
    """The traces, with rank 0's own tensor wherever another rank's has the same bits."""
    first, *others = traces
    return [first, *(_Shared(first).trace(other) for other in others)]


class _Shared:
    def __init__(self, first: Trace) -> None:
        self._first = first
        self._known: dict[tuple[int, int], bool] = {}

    def trace(self, other: Trace) -> Trace:
        pairs = zip(self._first.updates, other.updates, strict=False)
        updates = tuple(self._update(mine, theirs) for mine, theirs in pairs)
        return replace(
            other,
            updates=updates + other.updates[len(updates) :],
            averages_after=self._tensors(self._first.averages_after, other.averages_after),
        )

    def _update(self, mine: UpdateTrace, theirs: UpdateTrace) -> UpdateTrace:
        return replace(
            theirs,
            start=self._state(mine.start, theirs.start),
            gradient=self._tensors(mine.gradient, theirs.gradient),
            clipped=self._tensors(mine.clipped, theirs.clipped),
            before=self._tensors(mine.before, theirs.before),
            after=self._tensors(mine.after, theirs.after),
            end=self._state(mine.end, theirs.end),
            averages=self._tensors(mine.averages, theirs.averages),
        )

    def _state(self, mine: State, theirs: State) -> State:
        """Buffers are left: each replica has its own."""
        return replace(theirs, parameters=self._tensors(mine.parameters, theirs.parameters))

    def _tensors(self, mine: Mapping[str, T], theirs: Mapping[str, T]) -> dict[str, T]:
        return {
            name: value if (one := mine.get(name)) is None or not self._same(one, value) else one
            for name, value in theirs.items()
        }

    def _same(self, a: Tensor, b: Tensor | None) -> bool:
        if b is None:
            return False
        key = id(a), id(b)  # the traces hold both while this is used
        if key not in self._known:
            self._known[key] = same_bits(a, b)
        return self._known[key]
