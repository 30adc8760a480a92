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
    """Watches the wrapper whose forward the loop calls; changes nothing of it.

    Attributes:
        reduced: the backward that has just ended was one with which the wrapper reduces.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self.reduced = False
        given = rank.model
        self._wrapper = given if isinstance(given, DistributedDataParallel) else None
        self._holding: tuple[object, frozenset[int]] | None = None
        self._due = False
        self._read = 0
        self._buckets: tuple[tuple[str, ...], ...] | None = None
        self._lay: list[tuple[Tensor, int]] = []

    def forwarded(self, wrapper: DistributedDataParallel) -> None:
        """The loop calls a wrapper's forward: of its own, perhaps, not the one it was handed."""
        if wrapper is not self._wrapper:
            self._wrapper, self._read, self._buckets = wrapper, 0, None
            self._due = False
        # It does not forget: a forward under no_sync does not take back what one before it began.
        self._due |= bool(wrapper.require_backward_grad_sync)

    @property
    def flag(self) -> bool:
        """The wrapper's wish to reduce, as it stands now."""
        return self._wrapper is not None and bool(self._wrapper.require_backward_grad_sync)

    def comm_hook(self) -> str:
        """Name of the wrapper's communication hook; empty where it has none."""
        return "" if self._wrapper is None else _hook_of(self._wrapper) or ""

    def left_out(self, names: Mapping[int, str]) -> frozenset[str]:
        """Trained parameters that the wrapper does not hold; ``names`` are the model's by id."""
        return self._missing(names, frozenset())

    def unwrapped(self, names: Mapping[int, str]) -> frozenset[str]:
        """Of these, those that it was not told to ignore."""
        if self._wrapper is None:
            return frozenset()
        return self._missing(names, frozenset(self._wrapper.parameters_to_ignore))

    def _missing(self, names: Mapping[int, str], ignored: frozenset[str]) -> frozenset[str]:
        wrapper = self._wrapper
        if wrapper is None:
            return frozenset()
        if self._holding is None or self._holding[0] is not wrapper:
            self._holding = wrapper, _held(wrapper)
        held = self._holding[1]
        return frozenset(
            names[id(p)]
            for name, p in wrapper.module.named_parameters()
            if p.requires_grad and id(p) not in held and name not in ignored and id(p) in names
        )

    def backward_begins(self) -> None:
        """Note where gradients lie: one that is in its bucket already is divided in place."""
        wrapper = self._wrapper
        if self._due and wrapper is not None and wrapper.gradient_as_bucket_view:
            trained = wrapper.module.parameters()
            self._lay = [(p, p.grad.data_ptr()) for p in trained if p.grad is not None]

    def backward_ended(
        self, name: Callable[[], Mapping[int, str]], reached: bool = True
    ) -> Reduction | None:
        """How the backward that has just ended reduced; None if it did not, or that is not known.

        Args:
            name: gives the names of the model's parameters by ``id``.
            reached: it came to a forward of the model.
        """
        lay, self._lay = self._lay, []
        self.reduced = self._due and reached
        self._due &= not reached
        wrapper = self._wrapper
        if not self.reduced or wrapper is None or not _as_torch_does(wrapper, self._rank):
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
    return (
        _hook_of(wrapper) is None
        and wrapper.mixed_precision is None
        and dist.get_backend(group) == "gloo"
        and dist.get_world_size(group) == rank.D
        and dist.get_rank(group) == rank.dp_rank
    )


def _hook_of(wrapper: DistributedDataParallel) -> str | None:
    """Name of its communication hook."""
    name: str | None = wrapper._get_ddp_logging_data().get("comm_hook")
    return name


def _held(wrapper: DistributedDataParallel) -> frozenset[int]:
    """Parameters that it reduces, by ``id``: not those that were frozen when it was made.

    On a GPU its reducer would allocate to tell, and of sparse ones it cannot: one that was frozen
    then counts as held.
    """
    held: list[Tensor] = list(wrapper._module_parameters)
    reducer: Any = wrapper.reducer
    plain = all(p.device.type == "cpu" for p in held) and not _sparse(wrapper.module)
    if plain and hasattr(reducer, "_get_zeros_like_grad_buckets"):
        buckets = reducer._get_zeros_like_grad_buckets()
        held = [p for bucket in buckets for p in bucket.parameters()]
    return frozenset(map(id, [*held, *wrapper._delay_all_reduce_params]))


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
