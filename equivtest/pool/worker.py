"""One process of the pool: it waits for jobs and runs them, one after the other."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import socket
import sys
import threading
import traceback
import types
from typing import Any

import torch

from equivtest.pool.channel import Closed, Frame, receive, send
from equivtest.pool.codec import Blob, decode, encode
from equivtest.pool.footprint import Footprint
from equivtest.pool.messages import Birth, JobOrder, Raised, Returned, WorldOrder
from equivtest.pool.seat import Notes, Seat
from equivtest.pool.shared import Shelf
from equivtest.pool.state import ProcessState, set_rank_environment
from equivtest.pool.worlds import Worlds

_PR_SET_PDEATHSIG = 1


def main(birth: Birth, fds: tuple[int, ...], lifeline_fd: int, parent: int) -> None:
    """The life of a worker; its descriptors are socket, output, stacks, notes, and `dumped`."""
    task_fd, output_fd, stacks_fd, notes_fd, dumped_fd = fds
    _die_with(parent, lifeline_fd)
    if birth.visible_gpus is not None:  # read when CUDA is initialised, which nobody has done yet
        os.environ["CUDA_VISIBLE_DEVICES"] = birth.visible_gpus
    _redirect(output_fd)
    _dump_stacks_on_request(stacks_fd, dumped_fd)
    torch.set_num_threads(birth.threads)
    sock = socket.socket(fileno=task_fd)
    worker = _Worker(birth, sock, Notes(notes_fd), output_fd, stacks_fd)
    with contextlib.suppress(Closed):
        while True:
            worker.obey(receive(sock))


def _die_with(parent: int, lifeline_fd: int) -> None:
    """Never outlive the nursery (by the kernel, on Linux) or the controller (by its pipe)."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    threading.Thread(target=_watch_lifeline, args=(lifeline_fd,), daemon=True).start()


def _watch_lifeline(lifeline_fd: int) -> None:
    # Nobody ever writes: this returns when the only writer, the controller, is gone.
    os.read(lifeline_fd, 1)
    os.killpg(os.getpid(), signal.SIGKILL)


def _redirect(output_fd: int) -> None:
    # Appending, so that truncating before a job also moves the place of the next write.
    flags = fcntl.fcntl(output_fd, fcntl.F_GETFL)
    fcntl.fcntl(output_fd, fcntl.F_SETFL, flags | os.O_APPEND)
    os.dup2(output_fd, 1)
    os.dup2(output_fd, 2)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _dump_stacks_on_request(stacks_fd: int, dumped_fd: int) -> None:
    """On SIGUSR1 write every Python stack, then a byte to `dumped_fd`, even inside a C++ wait.

    faulthandler's handler runs in C and chains to Python's, which writes the byte in C as well.
    """
    flags = fcntl.fcntl(stacks_fd, fcntl.F_GETFL)
    fcntl.fcntl(stacks_fd, fcntl.F_SETFL, flags | os.O_APPEND)
    faulthandler.enable(stacks_fd, all_threads=True)
    os.set_blocking(dumped_fd, False)
    signal.signal(signal.SIGUSR1, _nothing)
    signal.set_wakeup_fd(dumped_fd, warn_on_full_buffer=False)
    faulthandler.register(signal.SIGUSR1, stacks_fd, all_threads=True, chain=True)


def _nothing(number: int, frame: types.FrameType | None) -> None:
    pass


class _Worker:
    def __init__(
        self, birth: Birth, sock: socket.socket, notes: Notes, output_fd: int, stacks_fd: int
    ) -> None:
        self._rank = birth.rank
        self._sock = sock
        self._notes = notes
        self._logs = (output_fd, stacks_fd)
        self._shelf = Shelf(reuse=birth.rank is None)
        self._worlds = Worlds(birth.rank or 0)
        self._cache: dict[Any, Any] = {}
        self._state = ProcessState()
        self._footprint = Footprint()

    def obey(self, frame: Frame) -> None:
        if frame.kind == "world":
            order = frame.meta
            send(self._sock, self._attempt_world(order))
        elif frame.kind == "keep":
            self._shelf.keep(frame.meta, Blob.received(frame.payload, frame.fds))
        elif frame.kind == "drop":
            self._shelf.drop(frame.meta)
        elif frame.kind == "job":
            blob = Blob.received(frame.payload, frame.fds)
            answer, result = self._run(frame.meta, blob)
            send(self._sock, answer)
            del result  # its file had to stay open until it was sent

    def _attempt_world(self, order: WorldOrder) -> Frame:
        try:
            self._worlds.create(order.size, order.path, order.seating)
        except BaseException as error:
            return Frame("raised", describe(error))
        if order.seating.gpus:
            self._footprint.accept()  # CUDA has just come up, and is no job's doing
        return Frame("returned", Returned(True))

    def _run(self, order: JobOrder, blob: Blob) -> tuple[Frame, Blob | None]:
        for fd in self._logs:
            os.ftruncate(fd, 0)
        self._notes.write("")
        sys.path[:] = order.sys_path
        with contextlib.suppress(OSError):
            if order.directory is not None:
                os.chdir(order.directory)
        try:
            result = self._call(order, blob)
        except BaseException as error:
            # Nothing is put back: the pool ends this process, and a GPU with a collective under way
            # that no other rank answers would let it wait for ever.
            return Frame("raised", describe(error)), None
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
        self._state.restore()
        intact = order.size == 0 or self._worlds.has(order.size, order.seating)
        left = self._footprint.left()
        return Frame("returned", Returned(intact, left), result.payload, result.fds), result

    def _call(self, order: JobOrder, blob: Blob) -> Blob:
        if order.size == 0:
            if torch.cuda.is_initialized():
                torch.cuda.set_device(0)  # the first GPU, which is rank 0's as well
            return self._call_in(None, 1, blob)
        set_rank_environment(self._rank or 0, order.size)
        with self._worlds.entered(order.size, order.seating, order.serial) as group:
            return self._call_in(group, order.size, blob)

    def _call_in(self, group: Any, size: int, blob: Blob) -> Blob:
        seat = Seat(self._rank or 0, size, group, self._cache, self._notes.write)
        modules_before = len(sys.modules)
        job, args = decode(blob, self._shelf.take)
        self._footprint.accept_imports(modules_before)
        value = job(seat, *args)
        try:
            return encode(value)
        except Exception as error:
            kind = type(value).__name__
            raise TypeError(f"the job's result (a {kind}) cannot be sent back: {error}") from error


def describe(error: BaseException) -> Raised:
    """An exception with its chain as text, without the pool's own frames on top."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    kind = type(error)
    name = kind.__qualname__
    if kind.__module__ not in ("builtins", "__main__"):
        name = f"{kind.__module__}.{name}"
    try:
        message = str(error)
        text = "".join(traceback.format_exception(kind, error, trace))
    except Exception as second:
        message = f"(its message cannot be read: {type(second).__name__})"
        text = "".join(traceback.format_tb(trace)) + f"{name}: {message}\n"
    return Raised(name, message, text)


def _is_own(filename: str) -> bool:
    return os.path.dirname(filename) == os.path.dirname(__file__) or filename == contextlib.__file__
