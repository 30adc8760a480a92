"""Memory of a microbatch: what the autograd graph holds, and the peak of a GPU.

The graph's logical bytes are deterministic and the same on any device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph


class _Saved:
    """A saved tensor in its graph node; its end is the end of what the graph holds of it."""

    __slots__ = ("key", "memory", "tensor", "version")

    key: int | None
    memory: GraphMemory
    tensor: Tensor
    version: int

    def __del__(self) -> None:
        if self.key is not None:
            self.memory.release(self.key)


class GraphMemory:
    """Counts what autograd saves while ``watching``: live bytes, live tensors, dtypes.

    A storage that several nodes share counts once. Parameters are counted too: the graph holds
    them, and they are the same for every plan.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_tensors = 0
        self._dtypes: set[torch.dtype] = set()
        self._bytes = 0
        self._sizes: dict[int, int] = {}
        self._holders: dict[int, int] = {}
        self._tensors = 0

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of real and complex floating numbers that were saved."""
        return {dtype for dtype in self._dtypes if dtype.is_floating_point or dtype.is_complex}

    @property
    def held(self) -> tuple[int, int]:
        """Bytes and tensors that the graph holds now."""
        return self._bytes, self._tensors

    def restart(self) -> None:
        """Measure peaks and dtypes from here on; what is alive stays counted."""
        self.peak_bytes, self.peak_tensors = self._bytes, self._tensors
        self._dtypes = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        disable = graph.disable_saved_tensors_hooks
        graph.disable_saved_tensors_hooks = self._stepping_aside(disable)  # type: ignore[assignment]
        try:
            with graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        finally:
            graph.disable_saved_tensors_hooks = disable

    def sees(self) -> bool:
        """Whether what is saved now is seen: of several hooks (a checkpoint's) the last has it."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(True)
        return top is not None and top[0] == self._pack

    def _stepping_aside(
        self, disable: Callable[[str], AbstractContextManager[None]]
    ) -> Callable[[str], AbstractContextManager[None]]:
        """``disable``, for which these hooks are no hooks: ``torch.func`` refuses to run with any.

        What a transform saves is then not counted.
        """

        @contextmanager
        def disabled(message: str) -> Iterator[None]:
            if not self.sees():
                with disable(message):
                    yield
                return
            torch._C._autograd._pop_saved_tensors_default_hooks()
            try:
                with disable(message):
                    yield
            finally:
                torch._C._autograd._push_saved_tensors_default_hooks(self._pack, _unpack)

        return disabled

    def _pack(self, tensor: Tensor) -> _Saved:
        # Called a hundred times in a forward: one function, and no call that can be spared.
        self._dtypes.add(tensor.dtype)
        saved = _Saved()
        # Detached: a node that holds what it made itself would keep its graph alive for good.
        saved.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        saved.version, saved.memory = tensor._version, self
        if tensor.layout is not torch.strided:
            saved.key = None
            return saved
        storage = tensor.untyped_storage()
        saved.key = key = storage.data_ptr()
        holders = self._holders
        if key in holders:
            holders[key] += 1
        else:
            holders[key] = 1
            self._sizes[key] = size = storage.nbytes()
            self._bytes += size
            if self._bytes > self.peak_bytes:
                self.peak_bytes = self._bytes
        self._tensors += 1
        if self._tensors > self.peak_tensors:
            self.peak_tensors = self._tensors
        return saved

    def release(self, key: int) -> None:
        """One holder of a storage less; ``key`` is its address."""
        self._tensors -= 1
        left = self._holders[key] - 1
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]
            self._bytes -= self._sizes.pop(key)


class _Mark:
    """Lies in a node of the graph and ends with it."""

    __slots__ = ("__weakref__",)


class LivingGraphs:
    """Whether the graphs of microbatches are alive: a backward frees what they saved, not them.

    A mark lies in the node of an output, in the dict that autograd keeps for such purposes.
    """

    def __init__(self) -> None:
        self._marks: list[weakref.ref[_Mark]] = []
        self._marked = False

    def begin(self) -> int:
        """A microbatch begins: how many before it are still alive."""
        self._marks = [mark for mark in self._marks if mark() is not None]
        self._marked = False
        return len(self._marks)

    def mark(self, output: Tensor) -> None:
        """The microbatch has given this; its first output stands for its graph."""
        if output.grad_fn is None or self._marked:
            return
        self._marked = True
        mark = _Mark()
        node: Any = output.grad_fn
        node.metadata["equivtest"] = mark
        self._marks.append(weakref.ref(mark))


class DevicePeak:
    """The most bytes that this process had allocated on its GPU since ``restart``.

    Of tensors, not what torch's allocator keeps for later. Nothing on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None

    @property
    def measures(self) -> bool:
        return self._device is not None

    def restart(self) -> None:
        """Measure from here on; what is allocated counts."""
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        return 0 if self._device is None else torch.cuda.max_memory_allocated(self._device)


def _unpack(saved: _Saved) -> Tensor:
    # Autograd does not check versions of what a hook packed: without this, the observer would let
    # an in-place modification pass that stops an unobserved loop.
    if saved.tensor._version != saved.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a saved tensor of shape {list(saved.tensor.shape)} is at version "
            f"{saved.tensor._version}; expected version {saved.version} instead"
        )
    return saved.tensor
