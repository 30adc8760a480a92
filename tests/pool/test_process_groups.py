"""Inside a job of D ranks the default process group is exactly those D ranks."""

import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from equivtest.pool import Pool, Seat


def describe_group(seat: Seat) -> tuple[int, int, int, float]:
    x = torch.tensor([float(seat.rank + 1)])
    dist.all_reduce(x)
    dist.barrier()
    return dist.get_rank(), dist.get_world_size(), dist.get_world_size(seat.group), x.item()


def test_the_default_group_is_exactly_the_ranks_of_the_job(pool: Pool) -> None:
    for size in (2, 4, 1, 3, 2, 4):
        total = size * (size + 1) / 2
        assert pool.run(describe_group, D=size) == [(r, size, size, total) for r in range(size)]


def test_ranks_persist_when_the_pool_grows_and_shrinks(pool: Pool) -> None:
    def pid(seat: Seat) -> int:
        return os.getpid()

    two = pool.run(pid, D=2)
    four = pool.run(pid, D=4)
    assert four[:2] == two
    assert pool.run(pid, D=2) == two
    assert len(set(four)) == 4


def test_the_single_process_has_no_process_group(pool: Pool) -> None:
    def look(seat: Seat) -> tuple[int, int, bool, bool]:
        return seat.rank, seat.size, seat.group is None, dist.is_initialized()

    assert pool.solo(look) == (0, 1, True, False)


def use_everything(seat: Seat) -> list[float]:
    """DDP, new groups, and meshes, as a training loop would make them."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 1))
    model(torch.full((2, 3), float(seat.rank))).sum().backward()
    pair = dist.new_group([0, 1])
    x = torch.tensor([1.0])
    if seat.rank < 2:
        dist.all_reduce(x, group=pair)
    mesh = init_device_mesh("cpu", (seat.size,), mesh_dim_names=("dp",))
    y = torch.tensor([1.0])
    dist.all_reduce(y, group=mesh.get_group("dp"))
    z = torch.tensor([1.0])
    dist.all_reduce(z, group=DeviceMesh.from_group(seat.group, "cpu").get_group())
    square = init_device_mesh("cpu", (seat.size // 2, 2), mesh_dim_names=("dp", "tp"))
    w = torch.tensor([1.0])
    dist.all_reduce(w, group=square.get_group("tp"))
    dist.barrier()
    assert model.module.weight.grad is not None
    return [model.module.weight.grad[0, 0].item(), x.item(), y.item(), z.item(), w.item()]


def test_groups_and_meshes_of_a_job_can_be_made_again_and_again(pool: Pool) -> None:
    pool.run(describe_group, D=4)
    for _ in range(5):
        # gradient of the sum over 2 examples: 2·rank, averaged over ranks 0 and 1
        assert pool.run(use_everything, D=2) == [[1.0, 2.0, 2.0, 2.0, 2.0]] * 2
        four = pool.run(use_everything, D=4)
        assert four == [[3.0, 2.0 if r < 2 else 1.0, 4.0, 4.0, 2.0] for r in range(4)]


def test_a_job_may_destroy_its_process_group(pool: Pool) -> None:
    def destroy(seat: Seat) -> None:
        dist.destroy_process_group()

    for _ in range(2):
        pool.run(destroy, D=2)
        assert pool.run(describe_group, D=2) == [(0, 2, 2, 3.0), (1, 2, 2, 3.0)]
        assert pool.run(describe_group, D=3)[2] == (2, 3, 3, 6.0)


def test_torchrun_variables_are_set_for_the_job_and_changes_undone(pool: Pool) -> None:
    def change(seat: Seat) -> tuple[str, str]:
        os.environ["LEFT_BY_A_JOB"] = "1"
        return os.environ["RANK"], os.environ["WORLD_SIZE"]

    def left(seat: Seat) -> bool:
        return "LEFT_BY_A_JOB" in os.environ

    assert pool.run(change, D=2) == [("0", "2"), ("1", "2")]
    assert pool.run(left, D=2) == [False, False]
    assert pool.solo(lambda seat: os.environ.get("RANK")) == os.environ.get("RANK")


def test_global_state_of_torch_is_back_after_each_job(pool: Pool) -> None:
    def change(seat: Seat) -> None:
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(False)
        torch.set_num_threads(2)
        torch.set_autocast_enabled("cpu", True)

    def look(seat: Seat) -> tuple[object, ...]:
        return (
            torch.rand(1).item(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_grad_enabled(),
            torch.get_num_threads(),
            torch.is_autocast_enabled("cpu"),
        )

    for call in (pool.solo, lambda job: pool.run(job, D=1)[0]):
        before = call(look)
        call(change)
        assert call(look) == before
        assert before[1:] == (torch.float32, False, True, 1, False)


def test_a_seat_keeps_its_cache_from_job_to_job(pool: Pool) -> None:
    def count(seat: Seat) -> int:
        seat.cache["jobs"] = seat.cache.get("jobs", 0) + 1
        return seat.cache["jobs"]

    first = pool.solo(count)
    assert pool.solo(count) == first + 1


def test_only_loopback_ports_are_open(pool: Pool) -> None:
    psutil = pytest.importorskip("psutil")
    pids = pool.run(lambda seat: os.getpid(), D=4)
    addresses = [c.laddr.ip for pid in pids for c in psutil.Process(pid).net_connections("inet")]
    assert addresses
    assert {a.removeprefix("::ffff:") for a in addresses} <= {"127.0.0.1", "::1"}


def test_what_ranks_print_is_shown_with_their_number(
    pool: Pool, capsys: pytest.CaptureFixture[str]
) -> None:
    def speak(seat: Seat) -> None:
        sys.stdout.write(f"I am {seat.rank}\n")
        if seat.rank == 1:
            os.write(2, b"raw\n")

    pool.run(speak, D=2)
    assert capsys.readouterr().out == "[rank 0] I am 0\n[rank 1] I am 1\n[rank 1] raw\n"
    pool.run(lambda seat: None, D=2)
    assert capsys.readouterr().out == ""
