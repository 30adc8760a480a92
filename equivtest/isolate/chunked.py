"""A module run microbatch by microbatch inside a large batch, the gradient going through all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


@contextmanager
def chunked(modules: Sequence[nn.Module], sizes: Sequence[int]) -> Iterator[None]:
    """Run ``modules`` on one microbatch after the other while the context lasts.

    Args:
        sizes: examples of each microbatch. A module's input may have several rows for an example
            (folded into the batch axis, example after example): as many for each.
    """
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_forward_in_chunks(module, sizes))
        yield


@contextmanager
def _forward_in_chunks(module: nn.Module, sizes: Sequence[int]) -> Iterator[None]:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        parts = [inner(*a, **k) for a, k in _cut((args, kwargs), sizes)]
        return torch.cat(parts)

    module.forward = forward
    try:
        yield
    finally:
        del module.forward


def _cut(arguments: Any, sizes: Sequence[int]) -> Iterator[Any]:
    at, n = 0, sum(sizes)
    for size in sizes:
        begin, end = at, at + size
        at = end

        def rows(leaf: Any, begin: int = begin, end: int = end) -> Any:
            if not isinstance(leaf, Tensor) or leaf.ndim == 0 or leaf.shape[0] % n:
                return leaf
            each = leaf.shape[0] // n
            return leaf[begin * each : end * each]

        yield tree_map(rows, arguments)
