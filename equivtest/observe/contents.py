"""Which examples a forward received, told by their contents where memory does not tell.

For loops with a loader of their own. What a forward received is matched with the experiment's
examples as they are, and with each of them collated alone. Where it cannot be told it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from equivtest.observe.matching import (
    Candidates,
    Leaf,
    Rows,
    Slot,
    as_compared,
    leaves_of,
    others_of,
    together,
)
from equivtest.observe.rng import RandomState

MOST_EXAMPLES = 4096
MOST_BYTES = 2**26
"""What is read of a data set to tell its examples: some tens of milliseconds."""

PATIENCE = 8
"""Forwards that nothing is found for, in a row, after which a loop's batches are no examples."""


class Contents:
    """The examples of one experiment, known by their contents; read when they are asked for.

    Args:
        data: the experiment's.
        alone: example id -> its batch of one, or None where collate changes nothing.
        stored: dtype in which the case holds floats.
    """

    def __init__(
        self, data: Sequence[Any], alone: Callable[[int], Any] | None, stored: torch.dtype
    ) -> None:
        self._raw = _Index(data.__getitem__, stored, batched=False)
        self._collated = None if alone is None else _Index(alone, stored, batched=True)
        self._n = len(data)

    def searching(self, planned: Iterable[int]) -> Search:
        """A search for one run of a loop, in the examples that its plan has first."""
        return Search(self, tuple(planned))

    def indexes(self, planned: Sequence[int]) -> Iterator[_Index]:
        """What to search in, one after the other, each filled when it is its turn."""
        rest = range(min(self._n, MOST_EXAMPLES))
        yield self._raw.filled(planned)
        if self._raw.lacks(rest):
            yield self._raw.filled(rest)
        if self._collated is not None:
            yield self._collated.filled([*planned, *rest])

    @property
    def left_out(self) -> str:
        """Why not all examples can be told by their contents; empty if they can."""
        if self._n > MOST_EXAMPLES:
            return f"the data has {self._n} examples, and {MOST_EXAMPLES} of them are searched"
        if self._raw.full:
            return f"the examples are large, and the first {MOST_BYTES >> 20} MiB are searched"
        return ""


class Search:
    """One run's search for the examples that its forwards received."""

    def __init__(self, contents: Contents, planned: tuple[int, ...]) -> None:
        self._contents, self._planned = contents, planned
        self._missed = 0
        self._found_in: dict[int, _Index] = {}
        self._asked = False

    def examples(self, received: Any, whole: bool) -> tuple[int, ...] | None:
        """Ids of the examples in what a forward received, row by row; None if unknown.

        Of examples with equal contents one stands for all (``twins``).

        Args:
            received: a pytree.
            whole: it is a batch, as collate makes it, and not what a model was called with.
        """
        self._asked = True
        if self._missed >= PATIENCE:
            return None
        with torch.no_grad():
            leaves = leaves_of(received)
            for index in self._contents.indexes(self._planned):
                found = index.find(leaves, whole)
                if found is not None:
                    self._missed = 0
                    self._found_in.update(dict.fromkeys(found, index))
                    return found if whole else _once(found)
        self._missed += 1
        return None

    @property
    def twins(self) -> tuple[tuple[int, ...], ...]:
        """Examples that were found and whose contents others have, with these."""
        classes = [index.twins(i) for i, index in sorted(self._found_in.items())]
        return tuple(one for one in classes if len(one) > 1)

    @property
    def left_out(self) -> str:
        """Why examples may be unknown that are in the data; empty if nothing was asked."""
        return self._contents.left_out if self._asked else ""


@dataclass
class _Index:
    """Examples by contents.

    Attributes:
        read: id -> its pytree; ``batched``: with an axis of length one for the batch.
        full: no more is read.
    """

    read: Callable[[int], Any]
    stored: torch.dtype
    batched: bool
    slots: dict[str, Slot] = field(default_factory=dict)
    full: bool = False
    _read: set[int] = field(default_factory=set)
    _size: int = 0
    _single: bool = True
    _classes: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    _class_of: dict[int, list[int]] = field(default_factory=dict)

    def lacks(self, ids: Iterable[int]) -> bool:
        return not self.full and any(i not in self._read for i in ids)

    def filled(self, ids: Iterable[int]) -> _Index:
        """With these examples read, as far as there is room."""
        if not self.lacks(ids):
            return self
        before = RandomState.now()
        try:
            for i in ids:
                if self._size > MOST_BYTES:
                    self.full = True
                    break
                if i not in self._read:
                    self._read.add(i)
                    self._add(i, self.read(i))
        except Exception:  # the user's own code, of which nothing may fail here
            self.full = True
        finally:
            before.restore()
        return self

    def _add(self, i: int, example: Any) -> None:
        contents: list[Any] = list(others_of(example))
        leaves = leaves_of(example)
        self._single &= len(leaves) + len(contents) == 1
        for leaf in leaves:
            tensor = as_compared(leaf.tensor, self.stored)
            if self.batched:
                if not tensor.dim() or len(tensor) != 1:
                    continue
                tensor = tensor[0]
            slot = self.slots.setdefault(leaf.path, Slot(tensor.dtype, leaf.name))
            if slot.kind == tensor.dtype:
                data = slot.add(i, tensor)
                self._size += len(data)
                contents.append((leaf.path, tuple(tensor.shape), data))
        known = self._classes.setdefault(tuple(contents), [])
        known.append(i)
        self._class_of[i] = known

    def twins(self, i: int) -> tuple[int, ...]:
        known = self._class_of.get(i, [i])
        return (i, *(j for j in known if j != i))

    def find(self, leaves: Sequence[Leaf], whole: bool) -> tuple[int, ...] | None:
        """One id for each row, along the first axis or else the second."""
        for axis in (0, 1):
            found = self._candidates(leaves, whole, axis)
            if found is not None:
                told = [self._one(candidates) for candidates in found]
                known = tuple(i for i in told if i is not None)
                return known if len(known) == len(told) else None
        return None

    def _one(self, candidates: frozenset[int]) -> int | None:
        """The first of examples that nothing tells apart; None where something would."""
        first = min(candidates)
        return first if candidates <= set(self._class_of.get(first, ())) else None

    def _candidates(self, leaves: Sequence[Leaf], whole: bool, axis: int) -> Candidates | None:
        same = whole and {leaf.path for leaf in leaves} == set(self.slots)
        told: list[tuple[Candidates, bool, bool]] = []
        for leaf in leaves:
            own = [s for path, s in self.slots.items() if same and path == leaf.path]
            own = own or [s for s in self.slots.values() if leaf.name and s.name == leaf.name]
            fits = self._fits(leaf.tensor, own or list(self.slots.values()), axis)
            if fits is not None:
                told.append((*fits, bool(own)))
            elif own:
                return None
        return together(told)

    def _fits(
        self, tensor: Tensor, slots: Sequence[Slot], axis: int
    ) -> tuple[Candidates, bool] | None:
        """Candidates by row of the slot that leaves fewest, and whether that tells by itself."""
        axis = min(axis, tensor.dim() - 1)
        if axis < 0 or not tensor.numel():
            return None
        rows = Rows(tensor, axis, self.stored)
        found = [(slot.match(rows), slot.telling or self._single) for slot in slots]
        fits = [(candidates, tells) for candidates, tells in found if candidates]
        return min(fits, key=lambda one: sum(map(len, one[0])), default=None)


def _once(ids: tuple[int, ...]) -> tuple[int, ...]:
    """A model that is shown a batch twice (under two masks, say) has received it once."""
    distinct = tuple(dict.fromkeys(ids))
    times, left = divmod(len(ids), len(distinct))
    if len(distinct) == 1 or left or times == 1:
        return ids
    blocks = distinct * times
    repeated = tuple(i for i in distinct for _ in range(times))
    return distinct if ids in (blocks, repeated) else ids
