"""How packed sequences hold the examples of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Packing:
    """How the rows of a ``PackedSequence`` hold a batch: position by position, the longest first.

    Attributes:
        sizes: rows of each position, its ``batch_sizes``.
        order: where in the batch each sequence stands, the longest first: its ``sorted_indices``.
            None where whoever packed them sorted them, and how was not seen.
    """

    sizes: tuple[int, ...]
    order: tuple[int, ...] | None

    @property
    def rows(self) -> int:
        return sum(self.sizes)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Of the sequences, the longest first."""
        return tuple(sum(size > at for size in self.sizes) for at in range(self.sizes[0]))


def packing_of(values: Any) -> Packing | None:
    """Of the first packed sequences among arguments or results."""
    if isinstance(values, PackedSequence):
        order = values.sorted_indices
        return Packing(
            tuple(values.batch_sizes.tolist()), None if order is None else tuple(order.tolist())
        )
    each = values if isinstance(values, (tuple, list)) else ()
    return next((found for value in each if (found := packing_of(value)) is not None), None)
