"""Ranks that die, raise, hang or skip a collective: that case is an error, and no other."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import psutil
import pytest
from sessions import LINEAR, Session

LOOPS = """
import os, signal, threading
import pytest
import torch.distributed as dist
from equivtest.loops import accumulate

def killed(rank):
    if rank.dp_rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    accumulate(rank)

def raising(rank):
    if rank.dp_rank == 1:
        raise RuntimeError("a rank of its own mind")
    accumulate(rank)

def sleeping(rank):
    if rank.dp_rank == 1:
        threading.Event().wait()
    accumulate(rank)

def skipping(rank):
    accumulate(rank)
    if rank.dp_rank == 0:
        dist.barrier()

HOSTILE = [None, killed, None, raising, None, sleeping, None, skipping, None]

@pytest.mark.parametrize("loop", HOSTILE)
def test_it(equivalence, loop):
    equivalence(linear, Plan(2, 2, 2), loop=loop, precision="fp64")
"""

WHAT = {
    "killed": "rank 1 of 2 was killed by SIGKILL",
    "raising": "a rank of its own mind",
    "sleeping": "rank 1",
    "skipping": "rank 0",
}


@pytest.fixture
def marked() -> str:
    """A mark in the environment, by which every process of one session is found."""
    return uuid.uuid4().hex


def of_session(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EQUIVTEST_MARK") == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("workers", ["0", "2"])
def test_each_hostile_loop_ends_its_own_case_only(
    session: Session, workers: str, marked: str
) -> None:
    session.write("test_hostile.py", LINEAR + LOOPS)
    status, output = session.run(
        "-n", workers, "--equiv-timeout", "20", environment={"EQUIVTEST_MARK": marked}
    )
    records = session.records()
    assert status == 1, output
    assert len(records) == 9, output
    good = [r["verdict"] for name, r in records.items() if "None" in name]
    assert [v["status"] for v in good] == ["equivalent"] * 5
    assert all(v["rows"] == good[0]["rows"] for v in good)
    for loop, text in WHAT.items():
        (verdict,) = (r["verdict"] for name, r in records.items() if loop in name)
        assert verdict["status"] == "error"
        assert text in verdict["failure"]["text"], verdict["failure"]["text"]
    _, alive = psutil.wait_procs(of_session(marked), timeout=30)
    assert not alive, [p.cmdline() for p in alive]


def test_a_killed_session_leaves_no_process(session: Session, marked: str, tmp_path: Path) -> None:
    """The controller dies in the middle of a case whose ranks hang."""
    began = tmp_path / "began"
    os.mkfifo(began)
    loop = f"""
import threading

def hanging(rank):
    if rank.dp_rank == 1:
        with open({str(began)!r}, "w") as pipe:
            pipe.write("x")
    threading.Event().wait()

def test_it(equivalence):
    equivalence(linear, Plan(2, 2, 2), loop=hanging)
"""
    session.write("test_hanging.py", LINEAR + loop)
    process = session.start(environment={"EQUIVTEST_MARK": marked})
    with open(began) as pipe:  # waits for the loop to begin
        pipe.read()
    left = of_session(marked)
    process.kill()
    process.communicate()
    assert len(left) >= 4  # pytest, the forkserver, two ranks
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive, [p.cmdline() for p in alive]
