"""Random numbers without a generator: a number is a hash of what it is for.

The finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014; constants of Stafford's variant 13), in torch's int64, whose products wrap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64

FLOAT64_BITS = 53


def key_of(*parts: object) -> int:
    """A 64-bit key of plain values: the same in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def uniforms(key: int, coordinates: Sequence[Tensor], bits: int = FLOAT64_BITS) -> Tensor:
    """Numbers in [0, 1), one for each multi-index: float64, with ``bits`` random bits.

    A number depends on its key and its own coordinates, and on the size of no axis.

    Args:
        coordinates: int64, which broadcast to the shape of the numbers; one at least.
    """
    hashed = torch.tensor(key, device=coordinates[0].device)
    for coordinate in coordinates:
        hashed = _mixed(hashed * _GOLDEN + _mixed(coordinate + _GOLDEN))
    return _shifted(hashed, 64 - bits).double() * 2.0**-bits


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, by: int) -> Tensor:
    """To the right, zeros coming in: torch's own shift brings in the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
