"""The controller's side of one worker."""

from __future__ import annotations

import os
import re
import socket

from equivtest.pool.channel import AnonymousFile, Frame, pack, send_packed
from equivtest.pool.messages import Birth
from equivtest.pool.seat import NOTES_BYTES, Notes
from equivtest.pool.shared import Ledger, Shared

_OUTPUT_TAIL = 1 << 20
_STACKS_TAIL = 1 << 16
# A worker that stops in the middle of a message would otherwise stop its controller as well.
_MESSAGE_LIMIT_S = 60.0


class Member:
    """One worker process: its socket, its logs, and what is known of its life."""

    def __init__(
        self, token: int, rank: int | None, threads: int, visible_gpus: str | None = None
    ) -> None:
        self.birth = Birth(token, rank, threads, visible_gpus)
        self.sock, self._their_sock = socket.socketpair()
        self.sock.settimeout(_MESSAGE_LIMIT_S)
        try:
            self._output = AnonymousFile.create("equivtest-output")
            self._stacks = AnonymousFile.create("equivtest-stacks")
            self._notes_file = AnonymousFile.create("equivtest-notes")
            os.ftruncate(self._notes_file.fd, NOTES_BYTES)
            self._notes = Notes(self._notes_file.fd)
            self.dumped, self._their_dumped = os.pipe()
        except OSError:  # no more files; the anonymous ones close themselves
            self.sock.close()
            self._their_sock.close()
            raise
        os.set_blocking(self.dumped, False)
        self.ledger = Ledger()
        self.pid: int | None = None
        self.gone = False
        self.status: int | None = None

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that the worker receives at its birth."""
        files = (self._output.fd, self._stacks.fd, self._notes_file.fd)
        return (self._their_sock.fileno(), *files, self._their_dumped)

    @property
    def name(self) -> str:
        return "solo" if self.birth.rank is None else f"rank {self.birth.rank}"

    def born(self, pid: int) -> None:
        """The worker has its descriptors: give up the controller's copies of its ends."""
        self.pid = pid
        self._their_sock.close()
        os.close(self._their_dumped)
        self._their_dumped = -1

    def send(self, frame: Frame) -> None:
        send_packed(self.sock, pack(frame), frame.fds)

    def supply(self, needed: list[Shared]) -> None:
        """Send the shared objects that the worker does not have yet."""
        missing, dropped = self.ledger.plan(needed)
        for digest in dropped:
            self.send(Frame("drop", digest))
        for shared in missing:
            blob = shared.blob
            self.send(Frame("keep", shared.digest, blob.payload, blob.fds))

    def output(self) -> str:
        """What the worker wrote to stdout and stderr during its last job."""
        return self._output.tail(_OUTPUT_TAIL)

    def stacks(self) -> str:
        """The Python stacks that it wrote on request, or as it was ended in C++."""
        return _without_own_threads(self._stacks.tail(_STACKS_TAIL))

    def last_event(self) -> str:
        return self._notes.read()

    def close(self) -> None:
        self.gone = True
        self.sock.close()
        self._their_sock.close()
        for fd in (self.dumped, self._their_dumped):
            if fd >= 0:
                os.close(fd)
        self.dumped = self._their_dumped = -1
        self._notes.close()
        for file in (self._output, self._stacks, self._notes_file):
            file.close()


def _without_own_threads(text: str) -> str:
    """faulthandler's dump without the thread that watches the lifeline, and without pool frames."""
    blocks = re.split(r"\n\n(?=Thread |Current thread )", text.strip())
    kept = [block for block in blocks if "in _watch_lifeline" not in block]
    lines = [line for block in kept for line in block.splitlines()]
    return "\n".join(line for line in lines if not _OWN_FRAME.search(line))


_OWN_FRAME = re.compile(
    r"equivtest/pool/(worker|nursery)\.py|^Extension modules: "
    r"|File \"<string>\", line 1 in <module>"
)
