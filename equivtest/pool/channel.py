"""Messages over a Unix socket, and the anonymous files that travel with them."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_HEADER = struct.Struct("!IQI")  # bytes of meta, bytes of payload, number of descriptors
_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MOST_FDS = 253  # what Linux takes in one message


class Closed(Exception):
    """The other side has closed the connection."""


@dataclass(frozen=True)
class Frame:
    """One message: a word, plain data, bytes, and open files, which the receiver then owns."""

    kind: str
    meta: Any = None
    payload: bytes | bytearray = b""
    fds: tuple[int, ...] = ()


class AnonymousFile:
    """An open file without a name: nothing can remain of it once every process has closed it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, label: str) -> AnonymousFile:
        if hasattr(os, "memfd_create"):
            return cls(os.memfd_create(label, os.MFD_CLOEXEC))
        fd, path = tempfile.mkstemp(prefix=label)
        os.unlink(path)
        return cls(fd)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def tail(self, limit: int = 1 << 20) -> str:
        """The last `limit` bytes, as text."""
        size = os.fstat(self.fd).st_size
        if size == 0:
            return ""
        start = max(0, size - limit)
        text = os.pread(self.fd, size - start, start).decode(errors="replace")
        return ("[...]" if start else "") + text


def pack(frame: Frame) -> bytes:
    """The bytes of a frame, for sending it to several receivers."""
    meta = pickle.dumps((frame.kind, frame.meta), protocol=5)
    return _HEADER.pack(len(meta), len(frame.payload), len(frame.fds)) + meta + frame.payload


def send(sock: socket.socket, frame: Frame) -> None:
    """Send one frame. Raises `Closed` if nobody is left to read it."""
    send_packed(sock, pack(frame), frame.fds)


def send_packed(sock: socket.socket, data: bytes, fds: Sequence[int]) -> None:
    """Send bytes made by `pack` and the descriptors of that frame."""
    try:
        if not fds:
            sock.sendall(data)
            return
        sent = socket.send_fds(sock, [data], list(fds))
        if sent < len(data):
            sock.sendall(memoryview(data)[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(sock: socket.socket) -> Frame:
    """Wait for one frame. Raises `Closed` at the end of the stream."""
    try:
        header, fds = _receive_header(sock)
        meta_size, payload_size, _ = _HEADER.unpack(header)
        kind, meta = pickle.loads(_receive_exactly(sock, meta_size))
        payload = _receive_exactly(sock, payload_size)
    except ConnectionResetError as error:
        raise Closed from error
    return Frame(kind, meta, payload, tuple(fds))


def _receive_header(sock: socket.socket) -> tuple[bytes, list[int]]:
    header, fds = b"", []
    while len(header) < _HEADER.size:
        part, more, _, _ = socket.recv_fds(sock, _HEADER.size - len(header), _MOST_FDS, _CLOEXEC)
        if not part:
            raise Closed
        header += part
        fds += more
    return header, fds


def _receive_exactly(sock: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, got = memoryview(data), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if count == 0:
            raise Closed
        got += count
    return data
