"""Where the microbatches of a plan lie in a tensor of the large batch. Pure.

Told by the tensors that the microbatches have by themselves at the same place: a size that the
number of examples divides is no evidence, and sizes alone do not tell a batch that is folded into
another axis example after example (major) from one in which the examples take turns (minor).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Parts:
    """The microbatches in one tensor.

    Attributes:
        axis: that they lie along.
        indices: int64 indices along it by microbatch; together each once.
    """

    axis: int
    indices: tuple[Tensor, ...]

    def fits(self, whole: Tensor) -> bool:
        """It has as many indices."""
        return whole.shape[self.axis] == sum(map(len, self.indices))

    def cut(self, whole: Tensor) -> list[Tensor]:
        """The microbatches."""
        return [whole.index_select(self.axis, index.to(whole.device)) for index in self.indices]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The other way round."""
        back = torch.argsort(torch.cat(self.indices))
        return torch.cat(list(parts), self.axis).index_select(self.axis, back.to(parts[0].device))


def common(a: Tensor, b: Tensor, *, at_end: bool = False) -> tuple[Tensor, Tensor]:
    """Views of what tensors of as many axes both have, where one is padded.

    Args:
        at_end: padding comes first.
    """
    for axis, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)):
        both = min(x, y)
        a = a.narrow(axis, x - both if at_end else 0, both)
        b = b.narrow(axis, y - both if at_end else 0, both)
    return a, b


def find(whole: Tensor, own: Sequence[Tensor], sizes: Sequence[int]) -> Parts | None:
    """The parts of ``whole`` that are most like what the microbatches have by themselves.

    Args:
        whole: shape ``(N, C, ...)``; examples are looked for along all axes but the second.
        own: the same of each microbatch; padded to its own longest example it may be shorter.
        sizes: examples of each microbatch.

    Returns:
        None where no axis can hold the examples.
    """
    if any(part.ndim != whole.ndim for part in own):
        return None
    axes = (axis for axis in range(whole.ndim) if axis != 1)
    candidates = [each for axis in axes for each in _along(axis, whole, own, sizes)]
    return min(candidates, key=lambda c: c.apart(whole, own), default=_NOWHERE).parts


@dataclass(frozen=True)
class _Candidate:
    """Parts, and the shape of the axis within one: of (example, entry), (entry, example) or (row).

    A size that is -1 follows from the tensor.
    """

    parts: Parts | None
    opened: tuple[tuple[int, ...], ...] = ()

    def apart(self, whole: Tensor, own: Sequence[Tensor]) -> float:
        """Distance over norm, as far as a microbatch's own tensor goes."""
        assert self.parts is not None
        axis, distance, norm = self.parts.axis, 0.0, 0.0
        for mine, theirs, shape in zip(self.parts.cut(whole), own, self.opened, strict=True):
            a, b = mine.unflatten(axis, shape), theirs.unflatten(axis, shape)
            a, b = common(a, b)
            distance += float((a - b).square().sum())
            norm += float(a.square().sum())
        return math.sqrt(distance / norm) if norm else math.inf


_NOWHERE = _Candidate(None)


def _along(
    axis: int, whole: Tensor, own: Sequence[Tensor], sizes: Sequence[int]
) -> Iterator[_Candidate]:
    """Examples along one axis: major or minor with as many rows each, or major as many as own."""
    n, rows = sum(sizes), whole.shape[axis]
    mine = [part.shape[axis] for part in own]
    if rows % n == 0 and not any(r % size for r, size in zip(mine, sizes, strict=True)):
        count = torch.arange(rows)
        major = count.reshape(n, rows // n).split(list(sizes))
        yield _Candidate(_parts(axis, major), tuple((size, -1) for size in sizes))
        minor = count.reshape(rows // n, n).split(list(sizes), 1)
        yield _Candidate(_parts(axis, minor), tuple((-1, size) for size in sizes))
    if sum(mine) == rows:
        yield _Candidate(_parts(axis, torch.arange(rows).split(mine)), tuple((r,) for r in mine))


def _parts(axis: int, indices: Sequence[Tensor]) -> Parts:
    return Parts(axis, tuple(map(torch.flatten, indices)))
