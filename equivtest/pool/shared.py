"""Large arguments that many jobs use."""

from __future__ import annotations

import functools
import hashlib
import os
from collections import OrderedDict
from typing import Any

from equivtest.arguments import a
from equivtest.pool.codec import Blob, Cited, decode, encode
from equivtest.pool.failure import Unsendable
from equivtest.pool.unsendable import where_unsendable

KEPT = 8


class Shared(Cited):
    """An argument that is large and used in many jobs.

    It is pickled once, at its first use, and its bytes go to each process at most once (a process
    keeps the last 8). A job receives the unwrapped object: afresh for every job in the ranks, so
    that a job which changes it cannot change the next; the same object again in `Pool.solo`.
    Changes to the object after its first use are not seen: a new `Shared` of it sees them, and
    is sent only if there are any.
    """

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    @functools.cached_property
    def blob(self) -> Blob:
        """The pickled object. Raises `Unsendable` where it cannot be pickled."""
        try:
            return encode(self.obj)
        except Exception as error:
            where = where_unsendable(f"what is shared, {a(self.obj)}", self.obj)
            raise Unsendable(where or str(error)) from error

    @functools.cached_property
    def digest(self) -> str:  # type: ignore[override]
        """A digest of the pickled bytes: equal contents are kept once in a process."""
        digest = hashlib.blake2b(self.blob.payload, digest_size=16)
        for fd in self.blob.fds:
            start = 0
            while chunk := os.pread(fd, 1 << 22, start):
                digest.update(chunk)
                start += len(chunk)
        return digest.hexdigest()


class Shelf:
    """The shared objects that one process keeps: their bytes, and in `solo` the object itself."""

    def __init__(self, *, reuse: bool) -> None:
        self._reuse = reuse
        self._blobs: dict[str, Blob] = {}
        self._objects: dict[str, Any] = {}

    def keep(self, digest: str, blob: Blob) -> None:
        self._blobs[digest] = blob

    def drop(self, digest: str) -> None:
        self._blobs.pop(digest, None)
        self._objects.pop(digest, None)

    def take(self, digest: str) -> Any:
        if digest in self._objects:
            return self._objects[digest]
        value = decode(self._blobs[digest])
        if self._reuse:
            self._objects[digest] = value
        return value


class Ledger:
    """What the controller knows to be on one process's shelf."""

    def __init__(self) -> None:
        self._there: OrderedDict[str, None] = OrderedDict()

    def plan(self, needed: list[Shared]) -> tuple[list[Shared], list[str]]:
        """What to send and what to drop so that `needed` are there and few others."""
        wanted = {shared.digest: shared for shared in needed}
        missing = [shared for digest, shared in wanted.items() if digest not in self._there]
        for digest in wanted:
            self._there[digest] = None
            self._there.move_to_end(digest)
        dropped = []
        while len(self._there) > max(KEPT, len(wanted)):
            dropped.append(self._there.popitem(last=False)[0])
        return missing, dropped
