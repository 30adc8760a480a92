"""Rows of what a forward received, matched with the contents of examples.

A row is one example's part of a tensor. It is an example's if it is the example's own row; that
row followed (or preceded) by a constant, as a collate pads; or, where some row of the tensor is
neither, that row without its last entry, as a language model drops the last token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import MappingKey, tree_flatten_with_path

Candidates = list[frozenset[int]]
"""By row, the ids of the examples that it may be."""


@dataclass(frozen=True)
class Leaf:
    """A tensor of a pytree; ``path`` tells where, ``name`` is the string key it hangs on, or ''."""

    path: str
    name: str
    tensor: Tensor


def leaves_of(tree: Any) -> list[Leaf]:
    """The tree's tensors; numbers, numpy arrays and lists of numbers count as such."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=_numbers)
    made = [(path, _tensor(leaf)) for path, leaf in flat]
    return [Leaf(_path(path), _name(path), tensor) for path, tensor in made if tensor is not None]


def others_of(tree: Any) -> tuple[Any, ...]:
    """What the tree holds beside tensors: strings by value, anything else like nothing else."""
    flat, _ = tree_flatten_with_path(tree, is_leaf=_numbers)
    return tuple(
        (_path(path), leaf if isinstance(leaf, (str, bytes)) else object())
        for path, leaf in flat
        if leaf is not None and _tensor(leaf) is None
    )


class Rows:
    """A tensor's rows along one of its axes.

    Args:
        stored: dtype in which examples are compared; whole numbers and booleans are as int64.
    """

    def __init__(self, tensor: Tensor, axis: int, stored: torch.dtype) -> None:
        plain = as_compared(tensor, stored).movedim(axis, 0).contiguous()
        self.kind, self.axis = plain.dtype, axis
        self.shape = tuple(plain.shape[1:])
        self._flat = plain.reshape(len(plain), -1)
        self.item = plain.element_size()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        size = self.item * self._flat.shape[1]
        self.bytes = [data[i * size : (i + 1) * size] for i in range(len(plain))]

    def __len__(self) -> int:
        return len(self.bytes)

    def first(self, i: int) -> float:
        """First element of row ``i``."""
        return float(self._flat[i, 0])

    def last(self, i: int) -> float:
        """Last element of row ``i``."""
        return float(self._flat[i, -1])

    @cached_property
    def constant_from(self) -> list[int]:
        """By row, the bytes before its last run of one value."""
        return [self.item * n for n in _last_other(self._flat, -1)]

    @cached_property
    def constant_to(self) -> list[int]:
        """By row, the bytes of its first run of one value."""
        size = self._flat.shape[1]
        return [self.item * (size - n) for n in _last_other(self._flat.flip(1), -1)]


@dataclass
class Slot:
    """One tensor of all examples: where it hangs, and whose contents it can have.

    Attributes:
        kind: dtype of its elements as they are compared.
        lengths: by the shape behind the first axis, lengths of that axis.
        telling: it has more than one whole number an example.
    """

    kind: torch.dtype
    name: str
    exact: dict[bytes, set[int]] = field(default_factory=dict)
    lengths: dict[tuple[int, ...], set[int]] = field(default_factory=dict)
    telling: bool = False
    _beginnings: dict[int, dict[bytes, set[int]]] = field(default_factory=dict)

    def add(self, i: int, tensor: Tensor) -> bytes:
        """Add example ``i``'s ``tensor``, as compared; its bytes."""
        data = tensor.contiguous().reshape(1, -1).view(torch.uint8).numpy().tobytes()
        self.exact.setdefault(data, set()).add(i)
        self.telling |= tensor.numel() > 1 or tensor.dtype != torch.int64
        if tensor.dim():
            self.lengths.setdefault(tuple(tensor.shape[1:]), set()).add(len(tensor))
        self._beginnings.clear()
        return data

    def match(self, rows: Rows) -> Candidates | None:
        """Whose the rows may be; None where one of them is nobody's."""
        if rows.kind != self.kind:
            return None
        exact = [self.exact.get(data, set()) for data in rows.bytes]
        used = {rows.last(i) for i, ids in enumerate(exact) if not ids}
        used |= {rows.first(i) for i, ids in enumerate(exact) if not ids}
        whole = [ids | self._padded(rows, i, ids, used) for i, ids in enumerate(exact)]
        if all(whole):
            return [frozenset(ids) for ids in whole]
        begun = self._begun(rows)
        cut = [ids | begun.get(data, set()) for ids, data in zip(whole, rows.bytes, strict=True)]
        return [frozenset(ids) for ids in cut] if all(cut) else None

    def _padded(self, rows: Rows, i: int, exact: set[int], used: set[float]) -> set[int]:
        """Shorter examples that padding makes this row.

        One that is an example as it is ends in padding only where it ends in 0, in a number below,
        or in what another row must have been padded with (``used``).
        """
        data, found = rows.bytes[i], set[int]()
        shorter = self._shorter(rows)
        if not shorter:
            return found
        after, before = rows.last(i), rows.first(i)
        for size in shorter:
            if size >= rows.constant_from[i] and (not exact or after <= 0 or after in used):
                found |= self.exact.get(data[:size], set())
            start = len(data) - size
            if start <= rows.constant_to[i] and (not exact or before <= 0 or before in used):
                found |= self.exact.get(data[start:], set())
        return found

    def _shorter(self, rows: Rows) -> list[int]:
        """Bytes of the examples that are shorter than these rows and otherwise of their shape."""
        if not rows.shape:
            return []
        stride = rows.item * math.prod(rows.shape[1:])
        known = self.lengths.get(rows.shape[1:], ())
        return [length * stride for length in known if 0 < length < rows.shape[0]]

    def _begun(self, rows: Rows) -> dict[bytes, set[int]]:
        """Ids by the beginning of examples that are longer than these rows by one."""
        if rows.axis or not rows.shape or rows.shape[0] < 2:
            return {}
        if rows.shape[0] + 1 not in self.lengths.get(rows.shape[1:], ()):
            return {}
        size, one = len(rows.bytes[0]), len(rows.bytes[0]) // rows.shape[0]
        if size not in self._beginnings:
            begun: dict[bytes, set[int]] = {}
            for data, ids in self.exact.items():
                if len(data) == size + one:
                    begun.setdefault(data[:size], set()).update(ids)
            self._beginnings[size] = begun
        return self._beginnings[size]


def together(told: Sequence[tuple[Candidates, bool, bool]]) -> Candidates | None:
    """Candidates that agree over tensors.

    Args:
        told: for each tensor its candidates, whether it tells by itself, and whether it must agree.
    """
    ordered = sorted(told, key=lambda one: (not one[1], sum(map(len, one[0]))))
    if not ordered or not ordered[0][1]:
        return None
    found = ordered[0][0]
    for candidates, _, must in ordered[1:]:
        if len(candidates) != len(found):
            if must:
                return None
            continue
        both = [a & b for a, b in zip(found, candidates, strict=True)]
        if all(both):
            found = both
        elif must:
            return None
    return found


def as_compared(tensor: Tensor, stored: torch.dtype) -> Tensor:
    """On the host, without a graph; floats as ``stored``, whole numbers as int64."""
    plain = tensor.detach()
    if plain.is_complex():
        return torch.view_as_real(plain.to("cpu", stored.to_complex()).resolve_conj())
    if plain.is_floating_point():
        return plain.to("cpu", stored)
    return plain.to("cpu", torch.int64)


def comparable(tensor: Tensor) -> bool:
    """It has plain elements in memory."""
    plain = tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
    return plain and tensor.device.type != "meta"


def _last_other(flat: Tensor, at: int) -> list[int]:
    """By row, the number of elements up to the last one that differs from element ``at``."""
    if not flat.shape[1]:
        return [0] * len(flat)
    others = flat != flat[:, at : at + 1 or None]
    places = torch.arange(1, flat.shape[1] + 1)
    return [int(n) for n in (others * places).amax(1)]


def _numbers(node: Any) -> bool:
    return (
        isinstance(node, list)
        and len(node) > 0
        and all(isinstance(x, (bool, int, float)) for x in node)
    )


def _tensor(leaf: Any) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf if comparable(leaf) else None
    if isinstance(leaf, (bool, int, float)) or _numbers(leaf):
        return torch.tensor(leaf)
    if hasattr(leaf, "__array__") and getattr(leaf, "dtype", None) is not None:
        return torch.as_tensor(leaf) if leaf.dtype.kind in "biuf" else None
    return None


def _path(path: Iterable[Any]) -> str:
    return "/".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _name(path: Sequence[Any]) -> str:
    last = path[-1] if path else None
    key = last.key if isinstance(last, MappingKey) else None
    return key if isinstance(key, str) else ""
