"""Which examples a forward received, told by the memory of the batches that the loop was handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivtest.observe.hooks import unwrapped


@dataclass(frozen=True)
class _Leaf:
    """Where a tensor of a batch lies: its first address, the one after its last, and a row's."""

    start: int
    end: int
    row: int

    @classmethod
    def of(cls, tensor: Tensor) -> _Leaf:
        start, end = memory_of(tensor)
        many = tensor.ndim > 0 and tensor.shape[0] > 1
        return cls(start, end, tensor.stride(0) * tensor.element_size() if many else end - start)

    def holds(self, other: _Leaf) -> bool:
        return self.start <= other.start < self.end

    def whole(self, other: _Leaf) -> bool:
        """``other`` has something of the first row and of the last: tokens but the last, say."""
        return other.start < self.start + self.row and other.end > self.end - self.row


@dataclass
class _Batch:
    """A batch that the loop was handed, held so that no other takes its memory."""

    batch: Any
    ids: tuple[int, ...]
    leaves: list[_Leaf]
    received: bool = False


class HandedOut:
    """The batches handed to the loop, with the ids of their examples."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    def remember(self, batch: Any, ids: tuple[int, ...]) -> Any:
        """Remember which examples ``batch`` holds, and give it back."""
        leaves = [_Leaf.of(leaf) for leaf in _in_memory(tree_leaves(batch))]
        if leaves:
            self._batches.append(_Batch(batch, ids, leaves))
        return batch

    def examples(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """Ids of the batch whose memory the leaves share.

        None if none or several do, and for a part of its rows: memory does not tell which
        examples those are.
        """
        told: set[tuple[int, ...] | None] = set()
        for received in map(_Leaf.of, _in_memory(leaves)):
            for batch in self._batches:
                for leaf in batch.leaves:
                    if leaf.holds(received):
                        batch.received = True
                        told.add(batch.ids if leaf.whole(received) else None)
        return told.pop() if len(told) == 1 else None

    def forget_received(self) -> None:
        """Let go of what a forward has received; a group's first batch may be fetched early."""
        self._batches = [batch for batch in self._batches if not batch.received]


def _in_memory(leaves: Sequence[Any]) -> list[Tensor]:
    tensors = [unwrapped(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
    return [t for t in tensors if t.layout is torch.strided and t.numel()]


def memory_of(tensor: Tensor) -> tuple[int, int]:
    """First address of a tensor's elements, and the one after its last."""
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
