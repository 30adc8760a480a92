"""What the pool does for GPUs, as far as it can be seen without one; the rest is skipped."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from equivtest.devices import Gpu, Machine, Seating
from equivtest.pool import Pool, Seat, codec, gpu
from equivtest.pool.member import Member
from equivtest.pool.surroundings import surroundings

needs_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device"
)


def environment(seat: Seat) -> dict[str, str]:
    return dict(os.environ)


def cuda_in_the_parent(seat: Seat) -> tuple[bool, bool]:
    return torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()


def test_ranks_are_born_with_what_cuda_and_nccl_need(pool: Pool) -> None:
    found = pool.run(environment, D=1)[0]
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"  # one of the two that torch accepts
    assert found["NCCL_SOCKET_IFNAME"] == "=lo"
    assert found["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    # Neither watchdog nor monitor ends a rank before the pool does.
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert found["TORCH_NCCL_ENABLE_MONITORING"] == "0"


def test_a_workspace_that_somebody_chose_is_kept_and_an_open_interface_is_not() -> None:
    given = {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_NET": "IB", "NCCL_COMM_ID": "10.0.0.1:5000"}
    found = surroundings({"CUBLAS_WORKSPACE_CONFIG": ":16:8", **given}, 1)
    assert found["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert found["NCCL_SOCKET_IFNAME"] == "=lo"
    assert not {"NCCL_NET", "NCCL_COMM_ID"} & found.keys()


def test_the_process_that_forks_ranks_has_not_touched_cuda(pool: Pool) -> None:
    assert pool.run(cuda_in_the_parent, D=1) == [(False, False)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_machine_without_gpus_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EQUIVTEST_WORKER", raising=False)  # these tests may be a worker's
    pool = Pool()
    try:
        assert pool.machine() == Machine()
        assert pool.run(environment, D=1)[0].get("CUDA_VISIBLE_DEVICES") == os.environ.get(
            "CUDA_VISIBLE_DEVICES"
        )
    finally:
        pool.close()


@pytest.fixture
def with_two_of_four_gpus() -> Iterator[Pool]:
    """A pool that was told of GPUs: of four of this session, the last two are its own."""
    pool = Pool(timeout_s=60.0)
    gpus = tuple(Gpu(name, "a model", (9, 0)) for name in ("3", "5", "6", "7"))
    pool._machine = Machine(gpus, dataclasses.replace(Machine().share, worker=1, workers=2))
    yield pool
    pool.close()


def test_ranks_see_their_pools_gpus_and_no_others(with_two_of_four_gpus: Pool) -> None:
    pool = with_two_of_four_gpus
    assert pool.run(environment, D=1)[0]["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert pool.solo(environment)["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_a_worker_owns_what_the_plugin_left_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIVTEST_WORKER", "1/3")
    pool = Pool()
    try:
        assert pool.machine().share == dataclasses.replace(Machine().share, worker=1, workers=3)
    finally:
        pool.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_group_that_cannot_be_made_says_why_and_the_pool_goes_on(pool: Pool) -> None:
    with pytest.raises(Exception, match=r"1 ranks were asked for and came up, but made no process"):
        pool.run(environment, D=1, seating=Seating("nccl", (0,)))
    assert len(pool.run(environment, D=2)) == 2


def test_a_fork_of_a_process_that_used_cuda_says_what_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="has initialised CUDA while it imported torch"):
        gpu.take(torch.device("cuda", 0))


def test_a_rank_takes_the_gpu_of_its_seat() -> None:
    shared = Seating("gloo", (0, 1, 0, 1))
    assert gpu.of_rank(shared, 2) == torch.device("cuda", 0)
    assert gpu.of_rank(shared, 3) == torch.device("cuda", 1)
    assert gpu.of_rank(Seating(), 3) is None


@pytest.mark.parametrize(
    ("worlds", "ended"),
    [
        ([(2, "nccl"), (4, "nccl")], [0, 1, 2, 3]),
        ([(4, "nccl")], [0, 1, 2, 3]),
        ([(1, "nccl"), (4, "gloo")], [1]),
        ([(1, "nccl")], [1]),
    ],
)
def test_a_rank_takes_those_with_it_that_share_an_nccl_communicator(
    worlds: list[tuple[int, str]], ended: list[int]
) -> None:
    """Rank 1 is lost: what remains of its communicators cannot be taken down."""
    pool = Pool()
    members = {rank: Member(rank, rank, 1) for rank in range(5)}
    pool._ranks = dict(members)
    pool._worlds = {(size, Seating(backend, tuple(range(size)))) for size, backend in worlds}
    try:
        found = pool._with_nccl_peers([members[1]])
        assert sorted(member.birth.rank or 0 for member in found) == ended
    finally:
        for member in members.values():
            member.close()


def stands_for_cuda(monkeypatch: pytest.MonkeyPatch, on_gpu: Any) -> list[int]:
    """Let ``on_gpu``'s storage count as one of a GPU; returns what was copied to the host."""
    copied: list[int] = []

    def on_host(storage: Any) -> Any:
        if storage.data_ptr() != on_gpu.untyped_storage().data_ptr():
            return storage
        copied.append(storage.nbytes())
        return storage.clone()

    monkeypatch.setattr(codec, "_on_host", on_host)
    return copied


@pytest.mark.parametrize("elements", [4, 40_000])  # in the message, and in the file beside it
def test_what_a_gpu_holds_travels_by_the_host_once(
    monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    tensor = torch.arange(float(elements))
    copied = stands_for_cuda(monkeypatch, tensor)
    whole, part = codec.decode(codec.encode((tensor, tensor[1:3])))
    assert torch.equal(whole, tensor)
    assert torch.equal(part, tensor[1:3])
    whole[1] = 7.0
    assert part[0] == 7.0  # they still share memory where they arrive
    assert copied == [4 * elements]


# -- on a GPU


def device_seen(seat: Seat) -> tuple[int, int, float]:
    value = torch.full((), 1.0 + seat.rank, device="cuda")
    dist.all_reduce(value)
    return torch.cuda.current_device(), torch.cuda.device_count(), float(value)


def tensor_on_gpu(seat: Seat) -> torch.Tensor:
    return torch.arange(5.0, device="cuda")


def unanswered(seat: Seat) -> None:
    if seat.rank == 0:
        dist.all_reduce(torch.ones(1, device="cuda"), async_op=True)


@pytest.fixture(scope="module")
def gpus() -> Iterator[tuple[Pool, int]]:
    pool = Pool(timeout_s=60.0)
    yield pool, len(pool.machine().own)
    pool.close()


@needs_gpu
def test_each_rank_has_its_gpu_on_nccl(gpus: tuple[Pool, int]) -> None:
    pool, own = gpus
    found = pool.run(device_seen, D=own, seating=Seating("nccl", tuple(range(own))))
    assert found == [(rank, own, own * (own + 1) / 2) for rank in range(own)]


@needs_gpu
def test_ranks_share_a_gpu_on_gloo(gpus: tuple[Pool, int]) -> None:
    pool, own = gpus
    assert pool.run(device_seen, D=2, seating=Seating("gloo", (0, 0))) == [(0, own, 3.0)] * 2


@needs_gpu
def test_a_gpus_tensor_arrives_on_the_host(gpus: tuple[Pool, int]) -> None:
    (found,) = gpus[0].run(tensor_on_gpu, D=1, seating=Seating("nccl", (0,)))
    assert found.device.type == "cpu"
    assert torch.equal(found, torch.arange(5.0))


@needs_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_collective_without_answer_ends_its_own_job_only(gpus: tuple[Pool, int]) -> None:
    pool, own = gpus
    seating = Seating("nccl", (0, 1))
    with pytest.raises(Exception, match="rank 1 of 2 returned without the collective"):
        pool.run(unanswered, D=2, seating=seating, timeout_s=10.0)
    assert pool.run(device_seen, D=2, seating=seating) == [(0, own, 3.0), (1, own, 3.0)]
