"""Norms and differences of gradients, accumulated in float64. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

MaybeTensors = Sequence[Tensor | None]


def norm(tensor: Tensor | None) -> float:
    """Euclidean norm in float64; 0 for None."""
    if tensor is None or tensor.numel() == 0:
        return 0.0
    value = dense(tensor)
    if not (value.is_floating_point() or value.is_complex()):  # a counter among buffers
        value = value.double()
    return float(torch.linalg.vector_norm(value, dtype=wide(value.dtype)))


def norms(tensors: MaybeTensors) -> list[float]:
    """``norm`` by position; one call, and one wait for a device, for all plain ones."""
    plain = [t for t in tensors if _plain(t)]
    at_once = torch._foreach_norm(plain, 2, torch.float64) if plain else ()
    found = iter(torch.stack(at_once).tolist() if plain else ())
    return [next(found) if _plain(t) else norm(t) for t in tensors]


def distance(a: Tensor | None, b: Tensor | None) -> float:
    """Euclidean norm of ``a - b`` in float64, None taken as zero; inf if it is not finite.

    In float64 throughout: the wider operand decides, so no copy is made for a float64 ``b``.
    """
    if a is None or b is None:
        only = b if a is None else a
        return _finite(norm(only))
    if a.shape != b.shape:
        return math.inf
    dtype = wide(a.dtype)
    return _finite(norm(dense(a).to(dtype) - dense(b).to(dtype)))


def difference(a: MaybeTensors, b: MaybeTensors) -> list[float]:
    """``distance`` by position."""
    return [distance(x, y) for x, y in zip(a, b, strict=True)]


def minus(a: MaybeTensors, b: MaybeTensors) -> list[Tensor | None]:
    """``a - b`` by position in float64, None taken as zero; None where both are."""
    total: list[Tensor | None] = [None] * len(a)
    accumulate(total, a)
    accumulate(total, b, -1.0)
    return total


def added(*several: MaybeTensors) -> list[Tensor | None]:
    """Their sum by position in float64, None taken as zero; None where all are."""
    total: list[Tensor | None] = [None] * len(several[0])
    for one in several:
        accumulate(total, one)
    return total


def accumulate(total: list[Tensor | None], part: MaybeTensors, weight: float = 1.0) -> None:
    """Add ``weight * part`` into ``total`` in place, in float64; None adds nothing."""
    held: list[Tensor] = []
    added: list[Tensor] = []
    for t, addend in enumerate(part):
        if addend is None:
            continue
        value, sum_so_far = dense(addend), total[t]
        if sum_so_far is None:
            total[t] = value.to(wide(value.dtype)) * weight
        else:
            held.append(sum_so_far)
            added.append(value)
    if held:
        torch._foreach_add_(held, added, alpha=weight)


def finite(tensors: MaybeTensors) -> list[bool]:
    """By position, whether no element is NaN or infinite."""
    return [math.isfinite(n) for n in norms(tensors)]


def bytes_of(tensors: MaybeTensors) -> int:
    """Bytes of the elements, a sparse tensor's zeros included."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def farthest(several: Sequence[MaybeTensors], b: MaybeTensors) -> list[float]:
    """By position, the largest ``distance`` of any to ``b``; one object is looked at once."""
    return [
        max(distance(x, y) for x in {id(x): x for x in held}.values())
        for *held, y in zip(*several, b, strict=True)
    ]


def ratio(distance: float, scale: float) -> float:
    """Distance over scale: 0 for 0 over 0, and inf for something over nothing."""
    if scale > 0:
        return distance / scale
    return 0.0 if distance == 0 else math.inf


def total(tensors: MaybeTensors) -> float:
    """Norm over all tensors."""
    return math.sqrt(sum(n**2 for n in norms(tensors)))


def apart(a: Mapping[str, Tensor | None], b: Mapping[str, Tensor | None]) -> float:
    """Distance over all tensors by name, relative to the norm of ``b``."""
    squared = sum(distance(a[n], b.get(n)) ** 2 for n in a)
    return ratio(math.sqrt(squared), total(list(b.values())))


def multiple(given: MaybeTensors, of: MaybeTensors) -> float:
    """The number that brings ``of`` nearest to ``given``; 0 where there is none."""
    above = below = 0.0
    for g, s in zip(given, of, strict=True):
        if g is not None and s is not None and s.isfinite().all():
            above += float((dense(g).double() * dense(s).double()).sum())
            below += norm(s) ** 2
    return above / below if below > 0 and math.isfinite(above) else 0.0


def times(gradients: Mapping[str, Tensor | None], number: float) -> dict[str, Tensor | None]:
    """By name, each in its dtype."""
    return {
        n: None if g is None else (g.double() * number).to(g.dtype) for n, g in gradients.items()
    }


def _plain(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return (
        tensor is not None
        and tensor.layout is torch.strided
        and tensor.is_floating_point()
        and tensor.numel() > 0
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def dense(tensor: Tensor) -> Tensor:
    """The tensor itself, or a sparse one with its zeros."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """complex128 for complex dtypes, float64 for others."""
    return torch.complex128 if dtype.is_complex else torch.float64
