"""Ranks that die, raise, hang or skip a collective: that case is an error, and no other.

And a session that is killed in the middle of a case: no process is left, and its records are.
"""

from __future__ import annotations

import os
import uuid

import psutil
import pytest
from sessions import LINEAR, Session

from equivtest.cli import main

HOSTILE = """
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
"""

# One function is one worker's: two workers wait for two time-outs at once.
LOOPS = {
    "dying": "None, killed, None, raising, None",
    "waiting": "None, sleeping, None",
    "skipping": "None, skipping, None",
}

TEST = """
@pytest.mark.parametrize("loop", [{loops}])
def test_{name}(equivalence, loop):
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


@pytest.mark.parametrize(
    ("workers", "names"), [("0", ["dying", "waiting"]), ("2", ["dying", "waiting", "skipping"])]
)
def test_each_hostile_loop_ends_its_own_case_only(
    session: Session, workers: str, names: list[str], marked: str
) -> None:
    tests = "".join(TEST.format(name=name, loops=LOOPS[name]) for name in names)
    session.write("test_hostile.py", LINEAR + HOSTILE + tests)
    status, output = session.run(
        "-n", workers, "--equiv-timeout", "10", environment={"EQUIVTEST_MARK": marked}
    )
    records = session.records()
    loops = [loop for name in names for loop in LOOPS[name].split(", ")]
    assert status == 1, output
    assert len(records) == len(loops), output
    good = [r["verdict"] for name, r in records.items() if "[None" in name]
    assert [v["status"] for v in good] == ["equivalent"] * loops.count("None")
    assert all(v["rows"] == good[0]["rows"] for v in good)
    for loop in set(loops) - {"None"}:
        (verdict,) = (r["verdict"] for name, r in records.items() if f"[{loop}]" in name)
        text = verdict["failure"]["text"]
        assert verdict["status"] == "error"
        assert WHAT[loop] in text, text
    _, alive = psutil.wait_procs(of_session(marked), timeout=30)
    assert not alive, [p.cmdline() for p in alive]


def test_a_killed_session_leaves_no_process_and_records_that_make_a_page(
    session: Session, marked: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The controller dies in the middle of a case whose ranks hang."""
    began = session.folder / "began"
    os.mkfifo(began)
    tests = f"""
import pytest, threading

def hanging(rank):
    if rank.dp_rank == 1:
        with open({str(began)!r}, "w") as pipe:
            pipe.write("x")
    threading.Event().wait()

@pytest.mark.parametrize("k", range(3))
def test_it(equivalence, k):
    equivalence(linear, Plan(2, 2, 2))
    if k == 1:
        equivalence(linear, Plan(2, 2, 2), loop=hanging)
"""
    session.write("test_hanging.py", LINEAR + tests)
    process = session.start("-p", "no:xdist", environment={"EQUIVTEST_MARK": marked})
    with open(began) as pipe:  # waits for the loop to begin
        pipe.read()
    left = of_session(marked)
    process.kill()
    process.communicate()
    assert len(left) >= 4  # pytest, the forkserver, two ranks
    _, alive = psutil.wait_procs(left, timeout=30)
    assert not alive, [p.cmdline() for p in alive]

    assert set(session.records()) == {"test_hanging.py::test_it[0]", "test_hanging.py::test_it[1]"}
    assert main(["report", str(session.folder / "reports")]) == 0
    assert "1 collected test left no record (1 never finished)" in capsys.readouterr().out
    assert "did not end by itself" in session.page()
