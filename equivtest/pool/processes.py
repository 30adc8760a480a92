"""The processes of a pool as its controller sees them: the nursery and the workers it forked."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator

from equivtest.pool.channel import AnonymousFile, Closed, Frame, receive, send
from equivtest.pool.failure import PoolError
from equivtest.pool.member import Member
from equivtest.pool.surroundings import surroundings

_START_LIMIT_S = 180.0
_FORK_LIMIT_S = 60.0
_FORKED_AT_ONCE = 32
_END_LIMIT_S = 10.0
_DUMP_LIMIT_S = 2.0
_MAIN = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from equivtest.pool.nursery import main; main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])"
)


class ForkFailed(PoolError):
    """Not all workers came up, of which `born` did; none of them is left."""

    def __init__(self, message: str, born: int) -> None:
        super().__init__(message)
        self.born = born


class Processes:
    """Starts, watches and ends processes. Every wait is on a selector."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tokens = itertools.count()
        self._members: dict[int, Member] = {}
        self._selector = selectors.DefaultSelector()
        self._log = AnonymousFile.create("equivtest-nursery")
        self.directory = tempfile.mkdtemp(prefix="equivtest-pool-")
        self._ready = False
        self.lost = False
        lifeline, self._lifeline = os.pipe()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_START_LIMIT_S)
        try:
            self._nursery = self._launch(theirs.fileno(), lifeline)
        finally:
            theirs.close()
            os.close(lifeline)
        self._selector.register(self._control, selectors.EVENT_READ)

    def _launch(self, control: int, lifeline: int) -> subprocess.Popen[bytes]:
        path = json.dumps([os.path.abspath(entry) for entry in sys.path])
        # The session of its own keeps Ctrl-C away.
        return subprocess.Popen(
            [sys.executable, "-c", _MAIN, path, str(control), str(lifeline), self.directory],
            pass_fds=(control, lifeline),
            stdin=subprocess.DEVNULL,
            stdout=self._log.fd,
            stderr=self._log.fd,
            start_new_session=True,
            env=surroundings(os.environ, self._threads),
        )

    def fork(self, ranks: Iterable[int | None], visible_gpus: str | None = None) -> list[Member]:
        """New workers, alive when this returns; they see these GPUs, or all."""
        self._wait_until(lambda: self._ready, "import torch")
        members: list[Member] = []
        deadline = time.monotonic() + _FORK_LIMIT_S
        try:
            for rank in ranks:
                if len(members) % _FORKED_AT_ONCE == 0:
                    self._wait_for(members, deadline)
                member = Member(next(self._tokens), rank, self._threads, visible_gpus)
                self._members[member.birth.token] = member
                members.append(member)
                with self._nursery_needed("fork"):
                    send(self._control, Frame("fork", member.birth, fds=member.fds))
            self._wait_for(members, deadline)
        except (OSError, PoolError) as error:
            born = sum(m.pid is not None for m in members)
            self.end(members)
            raise ForkFailed(str(error), born) from error
        for member in members:
            self._selector.register(member.sock, selectors.EVENT_READ, member)
        return members

    def _wait_for(self, members: list[Member], deadline: float) -> None:
        # Also keeps both sides from filling each other's buffers, and then waiting for each other.
        self._wait_until(lambda: all(m.pid is not None for m in members), "fork", deadline)

    @contextlib.contextmanager
    def _nursery_needed(self, purpose: str) -> Iterator[None]:
        try:
            yield
        except Closed:
            self._lose()
            raise self._nursery_error(purpose) from None

    def _wait_until(
        self, reached: Callable[[], bool], purpose: str, deadline: float | None = None
    ) -> None:
        deadline = deadline or time.monotonic() + _START_LIMIT_S
        while not reached():
            if self.lost or time.monotonic() > deadline:
                raise self._nursery_error(purpose)
            self.poll(deadline)

    def _nursery_error(self, purpose: str) -> PoolError:
        status = self._nursery.poll()
        how = "has not done it in time" if status is None else f"ended with status {status}"
        message = f"the process that forks the ranks was to {purpose} and {how}\n{self._log.tail()}"
        return PoolError(message.strip())

    def poll(self, deadline: float) -> list[tuple[Member, Frame | None]]:
        """Wait for news until the deadline: frames of workers, or `None` for one that has died."""
        news: list[tuple[Member, Frame | None]] = []
        events = self._selector.select(max(0.0, deadline - time.monotonic()))
        # Workers first: a last word is read before the news of its author's death.
        for key, _ in events:
            if key.data is not None and not key.data.gone:
                frame = self._read(key.data)
                if frame is not None:
                    news.append((key.data, frame))
        if any(key.data is None for key, _ in events):
            news += self._read_control()
        return news

    def _read(self, member: Member) -> Frame | None:
        """A frame, or nothing at the end of the stream: how it died is the nursery's to tell."""
        try:
            return receive(member.sock)
        except (Closed, OSError):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(member.sock)
            return None

    def _read_control(self) -> list[tuple[Member, Frame | None]]:
        try:
            frame = receive(self._control)
        except (Closed, OSError):
            return self._lose()
        if frame.kind == "ready":
            self._ready = True
        elif frame.kind == "forked":
            token, pid = frame.meta
            self._members[token].born(pid)
        elif frame.kind == "exited":
            token, status = frame.meta
            member = self._members.get(token)
            if member is not None:
                return self._bury(member, status)
        return []

    def _bury(self, member: Member, status: int | None) -> list[tuple[Member, Frame | None]]:
        last_words: list[tuple[Member, Frame | None]] = []
        if member.sock in self._selector.get_map():
            while _readable(member.sock) and (frame := self._read(member)) is not None:
                last_words.append((member, frame))
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(member.sock)
        member.gone, member.status = True, status
        self._members.pop(member.birth.token, None)
        return [*last_words, (member, None)]

    def _lose(self) -> list[tuple[Member, Frame | None]]:
        """The nursery is gone, and its workers with it."""
        self.lost = True
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(self._control)
        return [news for m in list(self._members.values()) for news in self._bury(m, None)]

    def refresh(self) -> None:
        """Take notice of what has died since the last job."""
        while self._ready and self._selector.select(0):
            self.poll(0.0)

    def dead_or_dying(self, member: Member) -> bool:
        """Whether an idle worker has gone; its socket tells before the nursery does."""
        return member.gone or member.sock not in self._selector.get_map()

    def dump_stacks(self, members: list[Member]) -> None:
        """Let living workers write their Python stacks, and wait until they have."""
        with selectors.DefaultSelector() as selector:
            alive = [member for member in members if not member.gone]
            if self._signal(alive, signal.SIGUSR1):
                for member in alive:
                    selector.register(member.dumped, selectors.EVENT_READ)
            deadline = time.monotonic() + _DUMP_LIMIT_S
            while selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    written = os.read(key.fd, 4096)
                    if not written or signal.SIGUSR1 in written:
                        selector.unregister(key.fd)

    def end(self, members: Iterable[Member]) -> None:
        """Kill workers; none of them runs when this returns."""
        doomed = list(members)
        self._signal([member for member in doomed if not member.gone], signal.SIGKILL)
        deadline = time.monotonic() + _END_LIMIT_S
        while not self.lost and any(not m.gone for m in doomed) and time.monotonic() < deadline:
            self.poll(deadline)
        for member in doomed:
            if not member.gone:
                self._bury(member, None)
            member.close()

    def _signal(self, members: list[Member], number: int) -> bool:
        tokens = [member.birth.token for member in members]
        try:
            send(self._control, Frame("signal", (tokens, int(number))))
        except (Closed, OSError):
            return False
        return True

    def close(self) -> None:
        """End the nursery and with it every worker, and wait for it."""
        members = list(self._members.values())
        self.abandon()
        try:
            self._nursery.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        for member in members:
            member.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def abandon(self) -> None:
        """Close what keeps the nursery and the workers alive, without waiting (after a fork)."""
        self.lost = True
        self._control.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
        self._lifeline = -1
        self._selector.close()

    def forget(self) -> None:
        """In a fork of the controller: hold none of its ends, and never speak for it."""
        for member in self._members.values():
            member.close()
        self.abandon()
        self._nursery.returncode = 0


def _readable(sock: socket.socket) -> bool:
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        return bool(selector.select(0))
