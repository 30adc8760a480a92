"""The pool: jobs in, results or one clear failure out."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from equivtest.devices import ON_CPU, Machine, Seating, share_from
from equivtest.pool.channel import Closed, Frame, pack, send_packed
from equivtest.pool.codec import Blob, Sealed, decode, encode
from equivtest.pool.exchange import Exchange
from equivtest.pool.failure import PoolError, RankFailed, Unsendable
from equivtest.pool.inventory import inventory
from equivtest.pool.member import Member
from equivtest.pool.messages import JobOrder, WorldOrder
from equivtest.pool.processes import ForkFailed, Processes
from equivtest.pool.shared import Shared
from equivtest.pool.unsendable import where_unsendable

_WORLD_LIMIT_S = 60.0
_log = logging.getLogger(__name__)


class Pool:
    """Persistent ranks on this machine, and one process outside of any process group.

    Nothing starts before the first job (or `start`). Everything ends with `close`, and with this
    process, however it ends.
    """

    def __init__(self, *, timeout_s: float = 120.0, threads: int = 1) -> None:
        self._timeout_s = timeout_s
        self._threads = threads
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._processes: Processes | None = None
        self._ranks: dict[int, Member] = {}
        self._solo: Member | None = None
        # Sizes and seatings whose process group exists in all its ranks.
        self._worlds: set[tuple[int, Seating]] = set()
        self._machine: Machine | None = None
        self._serial = itertools.count()
        _pools.add(self)

    def start(self) -> None:
        """Begin to import torch in the process that forks the ranks, without waiting for it."""
        with self._lock:
            self._check_pid()
            if self._processes is not None:
                self._processes.refresh()
                if self._processes.lost:
                    self.close()
            if self._processes is None:
                self._processes = Processes(self._threads)

    def machine(self) -> Machine:
        """The GPUs at hand and those of this process's share; asked once.

        In a process of its own, which then ends: this one never initialises CUDA, and neither does
        the one that forks the ranks. Raises `PoolError`, with torch's words, where CUDA is there
        and does not work.
        """
        with self._lock, self._ended_by_interrupts():
            if self._machine is None:
                (asked,) = self._started().fork([None])
                blob = _encode_job(inventory, (), [])
                gpus, facts = self._converse([asked], 0, ON_CPU, blob, [], None)[0]
                # What was born before sees all GPUs, and may not even have been asked for one.
                self._drop([asked, *self._ranks.values(), *([self._solo] if self._solo else [])])
                self._machine = Machine(gpus, share_from(os.environ), facts)
            return self._machine

    def run(
        self,
        job: Callable[..., Any],
        *args: Any,
        D: int,
        seating: Seating = ON_CPU,
        timeout_s: float | None = None,
        sealed: bool = False,
    ) -> list[Any]:
        """Call `job(seat, *args)` once in each of `D` ranks, whose default process group they are.

        It is of `seating`'s backend, and each rank has its GPU there, if any, as current device.

        Returns the results in rank order; `sealed` ones are for another job, in which they are
        opened. Raises `RankFailed` (`Timeout` when `timeout_s` has
        passed), and `PoolError` for what cannot be sent.
        """
        if D < 1:
            raise ValueError(f"D={D}, but a job needs at least one rank")
        cited: list[Shared] = []
        blob = _encode_job(job, args, cited)
        with self._lock, self._ended_by_interrupts():
            members = self._prepare_ranks(D, seating)
            return self._converse(members, D, seating, blob, cited, timeout_s, sealed)

    def solo(self, job: Callable[..., Any], *args: Any, timeout_s: float | None = None) -> Any:
        """Call `job(seat, *args)` in the one process that belongs to no process group."""
        cited: list[Shared] = []
        blob = _encode_job(job, args, cited)
        with self._lock, self._ended_by_interrupts():
            processes = self._started()
            if self._solo is not None and processes.dead_or_dying(self._solo):
                self._drop([self._solo])
            if self._solo is None:
                (self._solo,) = processes.fork([None], self._visible_gpus())
            return self._converse([self._solo], 0, ON_CPU, blob, cited, timeout_s)[0]

    def close(self) -> None:
        """End every process of the pool and remove its directory. A later job starts anew."""
        with self._lock:
            processes, self._processes = self._processes, None
            members = [*self._ranks.values(), *([self._solo] if self._solo else [])]
            self._ranks, self._solo, self._worlds = {}, None, set()
            if processes is None or self._pid != os.getpid():
                return
            processes.close()
            for member in members:
                member.close()

    def _check_pid(self) -> None:
        if self._pid != os.getpid():
            raise PoolError("this pool belongs to the process that forked this one; make another")

    def _started(self) -> Processes:
        self.start()
        assert self._processes is not None
        return self._processes

    @contextlib.contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        """A job that is left in any other way than by its end would answer the next one."""
        try:
            yield
        except PoolError:
            if self._processes is not None and self._processes.lost:
                self.close()
            raise
        except BaseException:
            self.close()
            raise

    def _visible_gpus(self) -> str | None:
        """What the workers' CUDA_VISIBLE_DEVICES becomes; None leaves it as it is."""
        own = self._machine.own if self._machine is not None else ()
        return ",".join(gpu.visible_as for gpu in own) or None

    def _prepare_ranks(self, size: int, seating: Seating) -> list[Member]:
        processes = self._started()
        self._drop([m for m in self._ranks.values() if processes.dead_or_dying(m)])
        absent = [rank for rank in range(size) if rank not in self._ranks]
        try:
            forked = processes.fork(absent, self._visible_gpus()) if absent else []
        except ForkFailed as error:
            born = size - len(absent) + error.born
            raise PoolError(f"{size} ranks were asked for, but {born} came up: {error}") from error
        self._ranks.update(zip(absent, forked, strict=True))
        members = [self._ranks[rank] for rank in range(size)]
        if (size, seating) not in self._worlds:
            path = os.path.join(processes.directory, f"group-{next(self._serial)}")
            frame = Frame("world", WorldOrder(size, path, seating))
            try:
                self._exchange(members, pack(frame), (), _WORLD_LIMIT_S, solo=False)
            except RankFailed as failure:
                why = str(failure).partition("\n")[0]
                failure.args = (
                    f"{size} ranks were asked for and came up, but made no process group: {why}",
                )
                raise
            self._worlds.add((size, seating))
        return members

    def _drop(self, members: Sequence[Member]) -> None:
        """End these workers, and forget every process group that one of them was in."""
        if not members:
            return
        members = self._with_nccl_peers(members)
        if self._processes is not None:
            self._processes.end(members)
        for member in members:
            if member is self._solo:
                self._solo = None
            elif member.birth.rank is not None:
                self._ranks.pop(member.birth.rank, None)
        self._worlds = {
            (size, seating)
            for size, seating in self._worlds
            if all(rank in self._ranks for rank in range(size))
        }

    def _with_nccl_peers(self, members: Sequence[Member]) -> list[Member]:
        """These workers, and those that have an NCCL communicator with one of them.

        A communicator that has lost a rank can neither be used nor relied upon to be taken down.
        Groups are of ranks 0 … size−1: with the largest that one was in go all others.
        """
        lowest = min((m.birth.rank for m in members if m.birth.rank is not None), default=None)
        sizes = [size for size, seating in self._worlds if seating.backend == "nccl"]
        if lowest is None or max(sizes, default=0) <= lowest:
            return list(members)
        peers = [self._ranks[rank] for rank in range(max(sizes)) if rank in self._ranks]
        return list(dict.fromkeys([*members, *peers]))

    def _converse(
        self,
        members: list[Member],
        size: int,
        seating: Seating,
        blob: Blob,
        cited: list[Shared],
        timeout_s: float | None,
        sealed: bool = False,
    ) -> list[Any]:
        for member in members:
            with contextlib.suppress(Closed):
                member.supply(cited)
        order = JobOrder(next(self._serial), size, tuple(sys.path), _directory(), seating)
        data = pack(Frame("job", order, blob.payload, blob.fds))
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        frames = self._exchange(members, data, blob.fds, limit_s, solo=size == 0)
        for member in members:
            _show_output(member)
        intact = [frame.meta.group_intact for frame in frames]
        if not all(intact):
            self._worlds.discard((size, seating))  # the job has destroyed torch's default group
        left = next((frame.meta.left for frame in frames if frame.meta.left), "")
        if any(intact) and not all(intact):
            left = left or "a process group that only some ranks have destroyed"
        if left:
            _log.info("%d ranks are replaced; left by the last job: %s", size, left)
            self._drop(members)
        if sealed:
            return [Sealed(Blob.received(frame.payload, frame.fds)) for frame in frames]
        return [_read_result(member, frame) for member, frame in zip(members, frames, strict=True)]

    def _exchange(
        self,
        members: list[Member],
        data: bytes,
        fds: tuple[int, ...],
        limit_s: float,
        *,
        solo: bool,
    ) -> list[Frame]:
        """Send one message to all and wait for all answers; ends the workers if one fails."""
        assert self._processes is not None
        exchange = Exchange(self._processes, members)
        for member in members:
            with contextlib.suppress(Closed):  # its death is reported by the nursery
                send_packed(member.sock, data, fds)
        in_time = exchange.wait(limit_s)
        if exchange.failed or not in_time:
            failure = exchange.failure(None if exchange.failed else limit_s, solo=solo)
            self._drop(members)
            raise failure
        return [exchange.answers[member] for member in members]


def _encode_job(job: Callable[..., Any], args: tuple[Any, ...], cited: list[Shared]) -> Blob:
    try:
        return encode((job, args), cited)
    except Exception as error:
        name = getattr(job, "__qualname__", repr(job))
        named = [(name, job), *((f"argument {i} of {name}", arg) for i, arg in enumerate(args))]
        found = (where_unsendable(what, value) for what, value in named)
        where = next((text for text in found if text is not None), None)
        raise Unsendable(where or f"the arguments of {name} cannot be sent: {error}") from error


def _read_result(member: Member, frame: Frame) -> Any:
    try:
        return decode(Blob.received(frame.payload, frame.fds))
    except Exception as error:
        kind = type(error).__name__
        raise PoolError(f"{member.name}'s result cannot be read: {kind}: {error}") from error


def _directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:
        return None


def _show_output(member: Member) -> None:
    for line in member.output().splitlines():
        sys.stdout.write(f"[{member.name}] {line}\n")


_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_current: Pool | None = None


def current_pool(**options: Any) -> Pool:
    """The pool of this process, made at first use with `options` and closed at its exit."""
    global _current
    if _current is None:
        _current = Pool(**options)
    return _current


@atexit.register
def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _after_fork() -> None:
    # A fork that held the controller's ends would keep the pool alive after the controller.
    global _current
    _current = None
    for pool in list(_pools):
        processes, pool._processes = pool._processes, None
        if processes is not None:
            processes.forget()


os.register_at_fork(after_in_child=_after_fork)
