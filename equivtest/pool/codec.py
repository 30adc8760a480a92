"""Objects to bytes and back, with large tensors in one anonymous file beside the bytes.

Storages are sent, not tensors: whatever shares memory in one message travels once and still shares
memory where it arrives. What lies on a GPU arrives on the host: the controller has no device, and
the reference arms' GPU is not the rank's. Torch is only touched where a message holds tensors.
"""

from __future__ import annotations

import ctypes
import functools
import io
import mmap
import os
import pickle
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from equivtest.pool.channel import AnonymousFile
from equivtest.pool.codepickler import CodePickler

_INLINE_BYTES = 1 << 15  # below this, a copy through the socket is cheaper than a mapping
_ALIGN = 64  # what torch's own allocator gives: kernels may choose their path by alignment


@dataclass(frozen=True)
class Blob:
    """An encoded object: the pickle, and files with the bytes of large tensors.

    The files of sealed objects in it come first, its own, if there is one, last.
    """

    payload: bytes | bytearray
    files: tuple[AnonymousFile, ...] = ()

    @property
    def fds(self) -> tuple[int, ...]:
        return tuple(file.fd for file in self.files)

    @classmethod
    def received(cls, payload: bytes | bytearray, fds: tuple[int, ...]) -> Blob:
        return cls(payload, tuple(map(AnonymousFile, fds)))


@dataclass(frozen=True)
class Sealed:
    """An object that was received and not opened: sent on, it is opened where it arrives."""

    blob: Blob


class Cited:
    """An object that is kept in the receiving process, and cited by its digest in messages."""

    digest: str


def encode(value: object, cited: list[Any] | None = None) -> Blob:
    """Pickle `value`; `Cited` objects are replaced by their digest and listed in `cited`."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, cited if cited is not None else [])
    pickler.dump(value)
    return Blob(buffer.getvalue(), pickler.files())


def decode(blob: Blob, resolve: Callable[[str], Any] | None = None) -> Any:
    """The object of a blob, afresh at each call; `resolve` gives the objects cited by digest."""
    before = getattr(_decoding, "now", None)
    _decoding.now = _Decoding(blob, resolve)
    try:
        return pickle.loads(blob.payload)
    finally:
        _decoding.now = before


class _Decoding:
    """What the functions that a pickle calls need to know of it."""

    def __init__(self, blob: Blob, resolve: Callable[[str], Any] | None) -> None:
        self.blob = blob
        self.resolve = resolve

    @functools.cached_property
    def memory(self) -> mmap.mmap:
        return mmap.mmap(self.blob.files[-1].fd, 0, access=mmap.ACCESS_COPY)


_decoding = threading.local()


class _Pickler(CodePickler):
    def __init__(self, buffer: io.BytesIO, cited: list[Any]) -> None:
        super().__init__(buffer, protocol=5)
        self._torch = sys.modules.get("torch")
        self._cited = cited
        self._storages: dict[int, tuple[Any, Any]] = {}
        self._placed: list[tuple[int, Any]] = []
        self._end = 0
        self._sealed: list[AnonymousFile] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        torch = self._torch
        if torch is not None:
            if kind is torch.Tensor or kind is torch.nn.Parameter:
                return self._reduce_tensor(torch, obj)
            if kind is torch.UntypedStorage and _has_memory(obj):
                return self._reduce_storage(_on_host(obj))
            if kind is torch.storage.TypedStorage and _has_memory(obj._untyped_storage):
                return _typed_storage, (self._one(obj._untyped_storage), obj.dtype)
        if isinstance(obj, Cited):
            self._cited.append(obj)
            return _cited, (obj.digest,)
        if kind is Sealed:
            first = len(self._sealed)
            self._sealed += obj.blob.files
            return _opened, (obj.blob.payload, first, len(self._sealed))
        return super().reducer_override(obj)

    def _reduce_tensor(self, torch: Any, tensor: Any) -> Any:
        plain = (
            tensor.layout is torch.strided
            and tensor.device.type in _WITH_MEMORY
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not tensor.__dict__
            and not tensor._backward_hooks
        )
        if not plain:
            return NotImplemented  # torch's own way, whose storages come back here
        return _tensor, (
            self._one(tensor.untyped_storage()),
            tensor.dtype,
            tensor.storage_offset(),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.requires_grad,
            type(tensor) is torch.nn.Parameter,
        )

    def _one(self, storage: Any) -> Any:
        """The same Python object for the same memory, so that the pickle's memo sends it once.

        On the host; the original is held as well, so that no other takes its address.
        """
        if storage._cdata not in self._storages:
            self._storages[storage._cdata] = (storage, _on_host(storage))
        return self._storages[storage._cdata][1]

    def _reduce_storage(self, storage: Any) -> Any:
        size = storage.nbytes()
        if size <= _INLINE_BYTES:
            return _inline_storage, (ctypes.string_at(storage.data_ptr(), size) if size else b"",)
        start = -(-self._end // _ALIGN) * _ALIGN
        self._placed.append((start, storage))
        self._end = start + size
        return _mapped_storage, (start, size)

    def files(self) -> tuple[AnonymousFile, ...]:
        """Those of sealed objects, and one with the large tensors if there are any."""
        return (*self._sealed, self._write_file()) if self._placed else tuple(self._sealed)

    def _write_file(self) -> AnonymousFile:
        file = AnonymousFile.create("equivtest-tensors")
        os.ftruncate(file.fd, self._end)
        for start, storage in self._placed:
            raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
            view, done = memoryview(raw).cast("B"), 0
            while done < len(view):
                done += os.pwrite(file.fd, view[done:], start + done)
        return file


_WITH_MEMORY = ("cpu", "cuda")


def _has_memory(storage: Any) -> bool:
    """Not so on ``meta``, which torch pickles in its own way."""
    return storage.device.type in _WITH_MEMORY


def _on_host(storage: Any) -> Any:
    """The storage itself, or a copy of one that a GPU holds."""
    return storage if storage.device.type == "cpu" else storage.cpu()


def _cited(digest: str) -> Any:
    return _decoding.now.resolve(digest)


def _opened(payload: bytes | bytearray, first: int, end: int) -> Any:
    outer = _decoding.now
    return decode(Blob(payload, outer.blob.files[first:end]), outer.resolve)


def _inline_storage(data: bytes) -> Any:
    import torch

    storage = torch.UntypedStorage(len(data))
    if data:
        ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage


def _mapped_storage(start: int, size: int) -> Any:
    import torch

    memory = _decoding.now.memory
    return torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start).untyped_storage()


def _typed_storage(storage: Any, dtype: Any) -> Any:
    import torch

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor(
    storage: Any,
    dtype: Any,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Any:
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor
