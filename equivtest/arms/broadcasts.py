"""Buffers that a replica takes over from rank 0 before a forward, as DDP broadcasts them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from equivtest.arms.bench import Bench
from equivtest.observe.trace import Tensors


class Broadcasts:
    """Those of one group, whose replicas run one after the other on ``bench``, rank 0 first."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._rank0: list[Tensors] = []

    @contextmanager
    def reaching(self, rank: int, forwards: Collection[int]) -> Iterator[None]:
        """Around a microbatch of ``rank``: what reaches it before these of its forwards.

        It is what rank 0 held before the same forward: of a loss that calls the model twice, the
        second broadcast brings what the first forward left.
        """
        number = count()
        if rank == 0:
            self._rank0 = []

        def before_forward(*_: Any) -> None:
            forward = next(number)
            if rank == 0:
                self._rank0.append(self._bench.buffers())
            elif forward in forwards and forward < len(self._rank0):
                self._take_over(self._rank0[forward])

        handle = self._bench.module.register_forward_pre_hook(before_forward)
        try:
            yield
        finally:
            handle.remove()

    def _take_over(self, buffers: Tensors) -> None:
        # By .data, as no version that autograd counts: a forward before may have saved the buffer.
        for name, buffer in self._bench.module.named_buffers():
            buffer.data.copy_(buffers[name])
