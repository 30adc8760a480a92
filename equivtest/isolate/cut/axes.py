"""Where the examples of a batch lie in a tensor, told by its shapes with other numbers of them.

The batch axis is the one that grows with the number of examples, wherever it stands: a size that
the number of examples divides is no evidence. Folded into another axis (tokens of all examples in a
row, heads beside the batch), the examples come one after the other (major) or interleaved (minor).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

COPIES = (2, 3, 4)
"""How many copies of one example the shapes are taken of: a model may refuse a single one, or drop
an axis of size 1."""


@dataclass(frozen=True)
class Layout:
    """Where the examples lie.

    Attributes:
        axes: those that grow with the number of examples; none in a tensor that all share, two in
            one of pairs.
        minor: folded into an axis so that examples are interleaved: ``index = j * n + example``.
        known: the shape grows as these say. If not, the tensor cannot be cut.
    """

    axes: tuple[int, ...] = ()
    minor: bool = False
    known: bool = True

    def interleaved(self) -> Layout:
        """The same with examples that take turns where they are folded into an axis.

        Shapes do not tell these two apart.
        """
        return replace(self, minor=True)

    @property
    def shared(self) -> bool:
        """All examples share the tensor, whatever their number."""
        return self.known and not self.axes


def layout(shapes: Sequence[Sequence[int]], copies: Sequence[int] = COPIES) -> Layout:
    """The layout of a tensor whose shapes with ``copies`` of one example these are."""
    first = shapes[0]
    if any(len(shape) != len(first) for shape in shapes):
        return Layout(known=False)
    grown = []
    for axis, sizes in enumerate(zip(*shapes, strict=True)):
        if len(set(sizes)) == 1:
            continue
        if any(size * copies[0] != sizes[0] * n for size, n in zip(sizes, copies, strict=True)):
            return Layout(known=False)
        if sizes[0] % copies[0]:
            return Layout(known=False)
        grown.append(axis)
    return Layout(tuple(grown))


def fits(tensor: Tensor, layout: Layout, n: int) -> bool:
    """The tensor can be cut as the layout of ``n`` examples."""
    return layout.known and all(
        axis < tensor.ndim and tensor.shape[axis] % n == 0 for axis in layout.axes
    )


def rows(tensor: Tensor, layout: Layout, n: int, begin: int, end: int) -> Tensor:
    """The examples ``begin`` to ``end`` of ``n``; of a tensor of pairs, the pairs among them."""
    for axis in layout.axes:
        opened, at = _opened(tensor, axis, layout.minor, n)
        tensor = opened.narrow(at, begin, end - begin).flatten(axis, axis + 1)
    return tensor


def joined(parts: Sequence[Tensor], layout: Layout, sizes: Sequence[int]) -> Tensor:
    """The parts of ``sizes`` examples as one tensor; the other way round than ``rows``."""
    (axis,) = layout.axes
    opened = [_opened(p, axis, layout.minor, n) for p, n in zip(parts, sizes, strict=True)]
    at = opened[0][1]
    return torch.cat([part for part, _ in opened], at).flatten(axis, axis + 1)


def _opened(tensor: Tensor, axis: int, minor: bool, n: int) -> tuple[Tensor, int]:
    """The axis as two, and which of them counts the examples."""
    each = tensor.shape[axis] // n
    return tensor.unflatten(axis, (each, n) if minor else (n, each)), axis + minor
