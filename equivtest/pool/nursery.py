"""A process that has imported torch and forks workers on request.

multiprocessing's own forkserver imports the user's `__main__` again, which runs scripts without a
main guard a second time and cannot work for `python -c`. This one knows nothing but its socket. It
ends, and its workers with it, when the controller is gone.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import shutil
import signal
import socket
import traceback
import types
from collections.abc import Iterator

from equivtest.pool.channel import Closed, Frame, receive, send
from equivtest.pool.messages import Birth


def main(control_fd: int, lifeline_fd: int, directory: str) -> None:
    """Serve until the controller closes its end; `directory` is then removed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=control_fd)
    nursery = _Nursery(control, lifeline_fd)
    try:
        with _inductor_cache_in(directory):
            _preload()
        send(control, Frame("ready"))
        nursery.serve()
    except Closed:
        pass
    finally:
        nursery.end_all()
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _inductor_cache_in(directory: str) -> Iterator[None]:
    """Importing torch._dynamo makes a cache directory, which would remain although unused."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name in os.environ:
        yield
        return
    os.environ[name] = os.path.join(directory, "inductor")
    yield
    os.environ.pop(name, None)


def _preload() -> None:
    import torch._dynamo
    import torch.distributed.device_mesh
    import torch.nn.parallel  # noqa: F401

    import equivtest.arms.candidate
    import equivtest.judging.judge
    import equivtest.pool.worker  # noqa: F401

    # What is alive now is shared with every worker: keep the collector from touching those pages.
    gc.collect()
    gc.freeze()


class _Nursery:
    def __init__(self, control: socket.socket, lifeline_fd: int) -> None:
        self._control = control
        self._lifeline_fd = lifeline_fd
        self._pids: dict[int, int] = {}  # token -> pid, until reaped
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)

    def serve(self) -> None:
        signal.signal(signal.SIGCHLD, _nothing)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._control:
                        self._obey(receive(self._control), selector)
                    else:
                        self._drain()
                    self._reap()

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_read.recv(4096):
                pass

    def _obey(self, frame: Frame, selector: selectors.BaseSelector) -> None:
        if frame.kind == "fork":
            self._fork(frame.meta, frame.fds, selector)
        elif frame.kind == "signal":
            tokens, number = frame.meta
            for token in tokens:
                if token in self._pids:  # not reaped yet, so the pid is still this worker's
                    _signal(self._pids[token], number)

    def _fork(self, birth: Birth, fds: tuple[int, ...], selector: selectors.BaseSelector) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                selector.close()
                for sock in (self._control, self._wake_read, self._wake_write):
                    sock.close()
                from equivtest.pool import worker

                worker.main(birth, fds, self._lifeline_fd, parent)
                status = 0
            except BaseException:
                traceback.print_exc()  # to where the worker's output goes
            finally:
                os._exit(status)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)
        for fd in fds:
            os.close(fd)
        self._pids[birth.token] = pid
        send(self._control, Frame("forked", (birth.token, pid)))

    def _reap(self) -> None:
        for token, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[token]
                # The processes that the worker started (of a DataLoader, say) are in its group.
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
                send(self._control, Frame("exited", (token, status)))

    def end_all(self) -> None:
        for pid in self._pids.values():
            _signal(pid, signal.SIGKILL)
        for pid in self._pids.values():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
            with contextlib.suppress(OSError):
                os.killpg(pid, number)
        os.kill(pid, number)


def _nothing(number: int, frame: types.FrameType | None) -> None:
    pass
