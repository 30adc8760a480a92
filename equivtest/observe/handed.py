"""Which examples a forward received, told by the memory of the batches that the loop was handed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivtest.observe.hooks import unwrapped


@dataclass
class _Batch:
    """A batch that the loop was handed, held so that no other takes its memory."""

    batch: Any
    ids: tuple[int, ...]
    spans: list[tuple[int, int]]
    received: bool = False


class HandedOut:
    """The batches handed to the loop, with the ids of their examples."""

    def __init__(self) -> None:
        self._batches: list[_Batch] = []

    def remember(self, batch: Any, ids: tuple[int, ...]) -> Any:
        """Remember which examples ``batch`` holds, and give it back."""
        spans = [memory_of(leaf) for leaf in _in_memory(tree_leaves(batch))]
        if spans:
            self._batches.append(_Batch(batch, ids, spans))
        return batch

    def examples(self, leaves: Sequence[Any]) -> tuple[int, ...] | None:
        """Ids of the batch whose memory the leaves share; None if none or several do."""
        addresses = [leaf.data_ptr() for leaf in _in_memory(leaves)]
        found = [
            batch
            for batch in self._batches
            if any(start <= at < end for at in addresses for start, end in batch.spans)
        ]
        for batch in found:
            batch.received = True
        ids = {batch.ids for batch in found}
        return ids.pop() if len(ids) == 1 else None

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
