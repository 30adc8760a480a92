"""What a job sees of the process that it runs in."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NOTES_BYTES = 4096
_LENGTH = struct.Struct("=I")


def _nowhere(event: str) -> None:
    pass


@dataclass
class Seat:
    """The place of a job in its process group.

    `group` is the default process group of exactly `size` ranks (`None` in `Pool.solo`). `cache`
    persists over the jobs of this process and is lost when the process is rebuilt.
    """

    rank: int
    size: int
    group: ProcessGroup | None
    cache: dict[Any, Any] = field(default_factory=dict)
    _write: Callable[[str], None] = _nowhere

    def note(self, event: str) -> None:
        """Record the last event where it can be read after the death of this process."""
        self._write(event)


class Notes:
    """The last event of a process, in memory that its controller shares."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, NOTES_BYTES)

    def write(self, event: str) -> None:
        text = event.encode(errors="replace")[: NOTES_BYTES - _LENGTH.size]
        self._memory[: _LENGTH.size + len(text)] = _LENGTH.pack(len(text)) + text

    def read(self) -> str:
        (length,) = _LENGTH.unpack_from(self._memory)
        return self._memory[_LENGTH.size : _LENGTH.size + length].decode(errors="replace")

    def close(self) -> None:
        self._memory.close()
