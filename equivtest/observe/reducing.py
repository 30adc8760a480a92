"""How ``DistributedDataParallel`` reduced: what lay in which bucket, and how it was divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from equivtest.experiment import Rank
from equivtest.observe.trace import Reduction

LAYOUTS = 2
"""Backwards after which a wrapper's buckets are read. It lays them out anew once at most: at the
first forward after a backward that reduced, by the order in which gradients came."""


class Reductions:
    """Watches the wrapper whose forward the loop calls; changes nothing of it."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._wrapper: DistributedDataParallel | None = None
        self._due = False
        self._read = 0
        self._buckets: tuple[tuple[str, ...], ...] | None = None
        self._lay: list[tuple[Tensor, int]] = []

    def forwarded(self, wrapper: DistributedDataParallel) -> None:
        """The loop calls a wrapper's forward: of its own, perhaps, not the one it was handed."""
        if wrapper is not self._wrapper:
            self._wrapper, self._read, self._buckets = wrapper, 0, None
        self._due = bool(wrapper.require_backward_grad_sync)

    def backward_begins(self) -> None:
        """Note where gradients lie: one that is in its bucket already is divided in place."""
        wrapper = self._wrapper
        if self._due and wrapper is not None and wrapper.gradient_as_bucket_view:
            trained = wrapper.module.parameters()
            self._lay = [(p, p.grad.data_ptr()) for p in trained if p.grad is not None]

    def backward_ended(self, name: Callable[[], Mapping[int, str]]) -> Reduction | None:
        """How the backward that has just ended reduced; None if it did not, or that is not known.

        Args:
            name: gives the names of the model's parameters by ``id``.
        """
        due, self._due = self._due, False
        lay, self._lay = self._lay, []
        wrapper = self._wrapper
        if not due or wrapper is None or not _as_torch_does(wrapper, self._rank):
            return None
        names = name()
        if self._read < LAYOUTS:
            self._read += 1
            self._buckets = _buckets(wrapper, names)
        if self._buckets is None:
            return None
        stayed = (p for p, at in lay if p.grad is not None and p.grad.data_ptr() == at)
        return Reduction(self._buckets, frozenset(names[id(p)] for p in stayed if id(p) in names))


def _as_torch_does(wrapper: DistributedDataParallel, rank: Rank) -> bool:
    """It divides by D and calls gloo's all-reduce over the replicas, on the host: no hook does."""
    group = wrapper.process_group
    hook = wrapper._get_ddp_logging_data().get("comm_hook")
    return (
        hook is None
        and wrapper.mixed_precision is None
        and dist.get_backend(group) == "gloo"
        and dist.get_world_size(group) == rank.D
        and dist.get_rank(group) == rank.dp_rank
    )


def _buckets(
    wrapper: DistributedDataParallel, names: Mapping[int, str]
) -> tuple[tuple[str, ...], ...] | None:
    """Parameter names by bucket; None where a flat buffer's order is not that of the elements.

    A gradient lies in its bucket as its parameter lies in memory, and a sparse one in none.
    """
    parameters = [p for p in wrapper.module.parameters() if p.requires_grad]
    plain = all(p.is_contiguous() and p.device.type == "cpu" for p in parameters)
    reducer: Any = wrapper.reducer
    if not plain or _sparse(wrapper.module) or not hasattr(reducer, "_get_zeros_like_grad_buckets"):
        return None
    held = [bucket.parameters() for bucket in reducer._get_zeros_like_grad_buckets()]
    if not all(id(p) in names for bucket in held for p in bucket):
        return None
    return tuple(tuple(names[id(p)] for p in bucket) for bucket in held)


def _sparse(module: nn.Module) -> bool:
    """It has a layer whose gradients the wrapper expects to be sparse."""
    layers = (m for m in module.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)))
    return any(layer.sparse for layer in layers)
