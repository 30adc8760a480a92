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

    __slots__ = ("memory", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, memory: GraphMemory) -> None:
        self.tensor = tensor
        self.version = tensor._version
        self.memory = memory
        self.storage = tensor.untyped_storage() if tensor.layout is torch.strided else None
        if self.storage is not None:
            memory.hold(self.storage)

    def __del__(self) -> None:
        if self.storage is not None:
            self.memory.release(self.storage)


class GraphMemory:
    """Counts what autograd saves while ``watching``: live bytes, live tensors, dtypes.

    A storage that several nodes share counts once. Parameters are counted too: the graph holds
    them, and they are the same for every plan.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.peak_tensors = 0
        self.dtypes: set[torch.dtype] = set()
        self._bytes = 0
        self._holders: dict[int, int] = {}
        self._tensors = 0

    @property
    def held(self) -> tuple[int, int]:
        """Bytes and tensors that the graph holds now."""
        return self._bytes, self._tensors

    def restart(self) -> None:
        """Measure peaks and dtypes from here on; what is alive stays counted."""
        self.peak_bytes, self.peak_tensors = self._bytes, self._tensors
        self.dtypes = set()

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
        if tensor.is_floating_point() or tensor.is_complex():
            self.dtypes.add(tensor.dtype)
        return _Saved(tensor, self)

    def hold(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        self._tensors += 1
        self._holders[key] = self._holders.get(key, 0) + 1
        if self._holders[key] == 1:
            self._bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        self.peak_tensors = max(self.peak_tensors, self._tensors)

    def release(self, storage: torch.UntypedStorage) -> None:
        key = storage.data_ptr()
        self._tensors -= 1
        self._holders[key] -= 1
        if self._holders[key] == 0:
            del self._holders[key]
            self._bytes -= storage.nbytes()


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
