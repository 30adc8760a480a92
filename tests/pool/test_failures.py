"""A rank that fails ends its job only, and is named."""

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest.pool import Pool, PoolError, RankFailed, Seat, Timeout, processes
from equivtest.pool import pool as pool_module


def raise_where_nothing_can_be_put_back(seat: Seat) -> None:
    """As a GPU with a collective under way that no other rank answers: every call waits for it."""
    torch.set_autocast_cache_enabled = lambda *_: threading.Event().wait()
    raise KeyError("of the job")


def test_a_job_that_raises_is_heard_before_its_process_is_put_back() -> None:
    pool = Pool(timeout_s=30.0)
    try:
        with pytest.raises(RankFailed, match="of the job") as ranks:
            pool.run(raise_where_nothing_can_be_put_back, D=2)
        with pytest.raises(RankFailed, match="of the job") as alone:
            pool.solo(raise_where_nothing_can_be_put_back)
        assert {e.value.exception_type for e in (ranks, alone)} == {"KeyError"}
        assert healthy(pool)
    finally:
        pool.close()


@pytest.fixture(scope="module")
def other() -> Iterator[Pool]:
    """A pool that no other test has grown."""
    pool = Pool()
    pool.solo(lambda seat: None)
    yield pool
    pool.close()


def test_more_ranks_than_come_up_are_counted(other: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FORK_LIMIT_S", 0.3)
    with pytest.raises(PoolError, match=r"^1000 ranks were asked for, but \d+ came up: [^\n]*$"):
        other.run(lambda seat: None, D=1000)
    monkeypatch.undo()
    assert healthy(other)


def test_ranks_that_cannot_be_opened_are_counted(other: Pool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 60, hard))
        with pytest.raises(PoolError, match=r"^40 ranks .* came up: .*Too many open files$"):
            other.run(lambda seat: None, D=40)
        assert healthy(other)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_ranks_that_make_no_group_in_time_are_counted(
    other: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "_WORLD_LIMIT_S", 0.0)
    message = "^3 ranks were asked for and came up, but made no process group: [^\n]*$"
    with pytest.raises(Timeout, match=message):
        other.run(lambda seat: None, D=3)
    monkeypatch.undo()
    assert healthy(other)


def healthy(pool: Pool, size: int = 2) -> bool:
    def job(seat: Seat) -> float:
        x = torch.ones(1)
        dist.all_reduce(x)
        return x.item()

    return pool.run(job, D=size) == [float(size)] * size


def failure(pool: Pool, job: object, *, size: int = 2, timeout_s: float = 30.0) -> RankFailed:
    assert callable(job)
    with pytest.raises(RankFailed) as caught:
        pool.run(job, D=size, timeout_s=timeout_s)
    assert healthy(pool, size)
    return caught.value


def test_an_exception_names_its_rank_and_the_others_stacks(pool: Pool) -> None:
    def job(seat: Seat) -> None:
        seat.note(f"before the barrier of {seat.rank}")
        if seat.rank == 1:
            try:
                {}["key"]
            except KeyError as error:
                raise ValueError("not that one") from error
        dist.barrier()

    error = failure(pool, job)
    assert (error.rank, error.what) == (1, "raised ValueError: not that one")
    assert (error.exception_type, error.exception_message) == ("ValueError", "not that one")
    assert not error.all_raised
    assert error.last_events == ("before the barrier of 0", "before the barrier of 1")
    assert "KeyError: 'key'" in error.stacks[1]
    assert "direct cause" in error.stacks[1]
    assert "raise ValueError" in error.stacks[1]
    assert "in barrier" in error.stacks[0]
    assert "equivtest/pool" not in error.stacks[0] + error.stacks[1]
    lines = str(error).splitlines()
    assert lines[0] == "rank 1 of 2 raised ValueError: not that one"
    assert lines[1] == "  last event: before the barrier of 1"


def test_ranks_that_all_raise_the_same_say_so(pool: Pool) -> None:
    class OddError(Exception):
        pass

    def job(seat: Seat) -> None:
        raise OddError("everywhere")

    error = failure(pool, job)
    assert error.all_raised
    assert error.exception_type is not None
    assert error.exception_type.endswith("OddError")
    assert str(error).startswith("all 2 ranks raised ")


@pytest.mark.parametrize("waits", [True, False], ids=["others wait", "others finish"])
def test_an_exit_is_reported_with_its_code(pool: Pool, waits: bool) -> None:
    def job(seat: Seat) -> None:
        sys.stdout.write("last words\n")
        if seat.rank == 1:
            os._exit(3)
        if waits:
            dist.barrier()

    error = failure(pool, job)
    assert (error.rank, error.what) == (1, "exited with code 3")
    assert error.output[1] == "last words\n"


def test_a_killed_rank_is_named_although_its_peers_raise(pool: Pool) -> None:
    def job(seat: Seat) -> None:
        seat.note("here")
        if seat.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))

    error = failure(pool, job, size=4)
    assert (error.rank, error.what) == (2, "was killed by SIGKILL")
    assert error.last_events == ("here",) * 4


def test_a_rank_that_waits_for_ever_is_named(pool: Pool) -> None:
    def job(seat: Seat) -> None:
        if seat.rank == 0:
            threading.Event().wait()
        dist.barrier()

    error = failure(pool, job, timeout_s=1.0)
    assert isinstance(error, Timeout)
    assert error.rank == 0
    assert error.what == "did not finish within 1 s; rank 1 waits in a collective"
    assert "in job" in error.stacks[0]
    assert "in barrier" in error.stacks[1]


def test_a_rank_that_skips_a_collective_is_named(pool: Pool) -> None:
    def job(seat: Seat) -> None:
        if seat.rank == 0:
            dist.all_reduce(torch.ones(1))

    error = failure(pool, job, timeout_s=1.0)
    assert isinstance(error, Timeout)
    assert error.rank == 1
    assert error.what == "returned without the collective in which rank 0 waits"


def test_collectives_of_different_sizes_are_reported_from_outside(pool: Pool) -> None:
    def job(seat: Seat) -> None:
        dist.all_reduce(torch.ones(1 + 4 * seat.rank))
        dist.barrier()

    error = failure(pool, job, timeout_s=10.0)
    assert error.rank in (0, 1)
    assert "SIGABRT" in error.what
    assert "terminate" in error.output[error.rank]


def test_a_rank_killed_between_two_jobs_is_replaced(pool: Pool) -> None:
    psutil = pytest.importorskip("psutil")
    rank = psutil.Process(pool.run(lambda seat: os.getpid(), D=2)[1])
    rank.kill()
    psutil.wait_procs([rank], timeout=10)
    assert healthy(pool)


def test_the_single_process_survives_the_failure_of_ranks_and_they_its(pool: Pool) -> None:
    def pid(seat: Seat) -> int:
        return os.getpid()

    def fail(seat: Seat) -> None:
        raise RuntimeError("on purpose")

    single, ranks = pool.solo(pid), pool.run(pid, D=2)
    with pytest.raises(RankFailed, match="the single process raised RuntimeError"):
        pool.solo(fail)
    assert pool.run(pid, D=2) == ranks
    single = pool.solo(pid)
    with pytest.raises(RankFailed):
        pool.run(fail, D=2)
    assert pool.solo(pid) == single


def test_a_failure_in_a_smaller_group_leaves_larger_ones_usable(pool: Pool) -> None:
    assert healthy(pool, 4)
    assert failure(pool, lambda seat: os._exit(1), size=2).rank in (0, 1)
    assert healthy(pool, 4)


def test_processes_that_a_rank_started_end_with_it(pool: Pool) -> None:
    psutil = pytest.importorskip("psutil")

    def job(seat: Seat) -> None:
        child = os.fork()
        if child == 0:
            threading.Event().wait()
        seat.note(str(child))
        os._exit(1)

    with pytest.raises(RankFailed) as caught:
        pool.run(job, D=1)
    child = int(caught.value.last_events[0])
    if psutil.pid_exists(child):
        psutil.wait_procs([psutil.Process(child)], timeout=10)
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"


def test_a_rank_that_hangs_in_its_forward_is_told_from_those_that_wait_in_backward(
    pool: Pool,
) -> None:
    class Stuck(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if dist.get_rank() == 1:
                threading.Event().wait()
            return super().forward(x)

    def job(seat: Seat) -> None:
        model = DistributedDataParallel(Stuck(2, 1))
        model(torch.ones(1, 2)).sum().backward()

    error = failure(pool, job, size=3, timeout_s=1.0)
    assert error.rank == 1
    assert error.what == "did not finish within 1 s; ranks 0, 2 wait in a collective"


def test_a_result_that_the_controller_cannot_read_costs_one_job(pool: Pool) -> None:
    class Fragile:
        def __reduce__(self) -> tuple[object, ...]:
            return int, ("not a number",)

    with pytest.raises(PoolError, match="rank 0's result cannot be read: ValueError"):
        pool.run(lambda seat: Fragile(), D=1)
    assert healthy(pool)
