"""Nothing of a pool remains, however its controller ends."""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from equivtest.pool import Pool, PoolError, Seat, current_pool

psutil = pytest.importorskip("psutil")
Script = Callable[..., subprocess.Popen[str]]

LIMIT_S = 60.0

JOBS = """
import os, json, sys
from equivtest.pool import Pool
pool = Pool(timeout_s=50)
total = pool.run(lambda seat: seat.rank, D=2)
single = pool.solo(lambda seat: os.getpid())
print(json.dumps([os.getpid(), total]), flush=True)
"""
WAIT = """
import threading
pool.run(lambda seat: threading.Event().wait(), D=2)
"""


def finish(process: subprocess.Popen[str]) -> str:
    try:
        out, err = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    return out


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The nursery and the workers of a script that has printed its line."""
    assert process.stdout is not None
    assert process.stdout.readline()
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 4  # nursery, two ranks, the single process
    return children


def assert_all_end(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize("inline", [False, True], ids=["without a main guard", "python -c"])
def test_scripts_run_once_and_leave_nothing(script: Script, tmp_path: Path, inline: bool) -> None:
    out = finish(script(JOBS, inline=inline))
    assert json.loads(out)[1] == [0, 1]
    assert len(out.splitlines()) == 1
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_killed_controller_leaves_nothing(script: Script, tmp_path: Path) -> None:
    process = script(JOBS + WAIT)
    processes = family(process)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert_all_end(processes)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_controller_and_nursery_killed_together_leave_no_process(script: Script) -> None:
    process = script(JOBS + WAIT)
    processes = family(process)
    os.kill(psutil.Process(process.pid).children()[0].pid, signal.SIGKILL)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert_all_end(processes)


def test_ctrl_c_ends_the_job_and_the_ranks(script: Script) -> None:
    process = script(
        JOBS
        + """
import signal, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
try:
    pool.run(lambda seat: threading.Event().wait(), D=2)
except KeyboardInterrupt:
    print("interrupted")
    print(pool.run(lambda seat: seat.rank, D=2))
"""
    )
    processes = family(process)
    process.send_signal(signal.SIGINT)
    assert finish(process).splitlines() == ["interrupted", "[0, 1]"]
    assert_all_end(processes)


def test_a_killed_nursery_ends_the_job_and_a_new_one_serves_the_next() -> None:
    def nurseries() -> list[psutil.Process]:
        return [p for p in psutil.Process().children() if "equivtest.pool" in str(p.cmdline())]

    before = {p.pid for p in nurseries()}
    pool = Pool(timeout_s=30)
    try:
        ranks = [psutil.Process(pid) for pid in pool.run(lambda seat: os.getpid(), D=2)]
        (nursery,) = [p for p in nurseries() if p.pid not in before]

        def kill(seat: Seat, pid: int) -> None:
            os.kill(pid, signal.SIGKILL)
            signal.pause()

        with pytest.raises(PoolError, match="the process that forks the ranks"):
            pool.run(kill, nursery.pid, D=2)
        assert_all_end([*ranks, nursery])
        assert pool.run(lambda seat: seat.rank, D=2) == [0, 1]
        (nursery,) = [p for p in nurseries() if p.pid not in before]
        nursery.kill()
        assert_all_end([nursery])  # killed while nobody looks: else the next job may see it die
        assert pool.run(lambda seat: seat.rank, D=2) == [0, 1]
    finally:
        pool.close()
        pool.close()
    assert {p.pid for p in nurseries()} == before


def test_a_fork_of_the_controller_does_not_share_its_pool(script: Script) -> None:
    out = finish(
        script(
            """
            import os
            from equivtest.pool import PoolError, current_pool
            pool = current_pool(timeout_s=50)
            assert pool is current_pool()
            pool.run(lambda seat: seat.rank, D=1)
            child = os.fork()
            if child == 0:
                try:
                    pool.run(lambda seat: seat.rank, D=1)
                except PoolError:
                    os._exit(0 if current_pool() is not pool else 2)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            print(pool.run(lambda seat: seat.rank, D=1))
            """
        )
    )
    assert out == "[0]\n"


def test_a_pool_that_never_ran_starts_no_process() -> None:
    before = psutil.Process().children()
    Pool().close()
    assert current_pool() is current_pool()
    assert psutil.Process().children() == before
