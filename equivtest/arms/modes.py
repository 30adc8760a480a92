"""A model in the modes (train or eval) in which the loop ran its modules."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def switched(module: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Modules of these names are in the other mode until the context ends, those inside are not."""
    parts = (
        {
            id(part): part
            for name, part in module.named_modules(remove_duplicate=False)
            if name in names
        }
        if names
        else {}
    )
    for part in parts.values():
        part.training = not part.training
    try:
        yield
    finally:
        for part in parts.values():
            part.training = not part.training
