"""What the cases of one experiment keep for each other in a process, within bounds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch

from equivtest.distance import dense
from equivtest.observe.trace import Tensors

EXPERIMENTS = 4
"""How many experiments anything is kept of."""

ORACLES = 16
ORACLE_BYTES = 1 << 30
"""How many oracles and large batches are kept of one, and what they may hold together."""


class Kept:
    """What is kept of one experiment on one device; experiments used longest ago are let go.

    Args:
        cache: what this process keeps between cases.
        key: of the experiment and the device.

    Attributes:
        held: all that is kept but the oracles and large batches.
    """

    def __init__(self, cache: dict[Any, Any], key: str) -> None:
        experiments: dict[str, dict[Any, Any]] = cache.setdefault("experiments", {})
        self.held = experiments.pop(key, {})
        experiments[key] = self.held
        while len(experiments) > EXPERIMENTS:
            experiments.pop(next(iter(experiments)))

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """What was made before under ``key``, or is made now."""
        if key not in self.held:
            self.held[key] = make()
        return self.held[key]

    def recent(self, key: Any, make: Callable[[], Any]) -> Any:
        """Keep the last few: a run over plans comes back to the first update's, not to others."""
        recent: dict[Any, Any] = self.held.setdefault("recent", {})
        if key not in recent:
            recent[key] = make()
        recent[key] = recent.pop(key)
        while len(recent) > 1 and (
            len(recent) > ORACLES or sum(r.held_bytes for r in recent.values()) > ORACLE_BYTES
        ):
            recent.pop(next(iter(recent)))
        return recent[key]


def fingerprint(tensors: Tensors, stored: torch.dtype) -> bytes:
    """A hash of the tensors' bits, and of the dtype that inputs are stored in."""
    digest = hashlib.blake2b(str(stored).encode(), digest_size=16)
    for name in sorted(tensors):
        value = dense(tensors[name].detach()).cpu().contiguous()
        digest.update(name.encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()
