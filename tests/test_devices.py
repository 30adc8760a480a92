"""The sharing-out of GPUs: who owns which, and where the replicas of a case sit."""

from __future__ import annotations

import pytest

from equivtest.devices import (
    NO_DEVICE,
    Gpu,
    Machine,
    Seating,
    Share,
    dealt,
    first_free,
    seated,
    share_from,
    visible_names,
    workers_for,
)


def machine(gpus: int, share: Share = Share(), models: str = "") -> Machine:  # noqa: B008
    names = models or "A" * gpus
    found = tuple(Gpu(str(k), f"model {name}", (8, 0)) for k, name in enumerate(names))
    return Machine(found, share)


@pytest.mark.parametrize(
    ("gpus", "workers", "shares"),
    [
        (4, 1, ["0123"]),
        (4, 2, ["01", "23"]),
        (8, 3, ["01", "23", "45"]),  # 8 // 3 = 2, and two GPUs idle
        (2, 3, ["", "", ""]),
        (0, 1, [""]),
    ],
)
def test_every_worker_owns_as_many_gpus_and_none_that_another_owns(
    gpus: int, workers: int, shares: list[str]
) -> None:
    found = ["".join(dealt("01234567"[:gpus], Share(k, workers))) for k in range(workers)]
    assert found == shares


@pytest.mark.parametrize("gpus", range(10))
@pytest.mark.parametrize("workers", range(1, 6))
def test_shares_are_disjoint_and_equal(gpus: int, workers: int) -> None:
    shares = [dealt(range(gpus), Share(k, workers)) for k in range(workers)]
    owned = [gpu for share in shares for gpu in share]
    assert len(owned) == len(set(owned))
    assert len({len(share) for share in shares}) == 1


@pytest.mark.parametrize(
    ("gpus", "max_D", "workers"), [(0, 4, 1), (1, 4, 1), (4, 4, 1), (7, 4, 1), (8, 4, 2), (8, 1, 8)]
)
def test_there_are_as_many_workers_as_have_a_gpu_for_every_replica(
    gpus: int, max_D: int, workers: int
) -> None:
    assert workers_for(gpus, max_D) == workers


def test_replicas_with_a_gpu_each_meet_on_nccl() -> None:
    assert seated(1, machine(1), False) == Seating("nccl", (0,))
    assert seated(3, machine(4), False) == Seating("nccl", (0, 1, 2))
    # The GPUs of the second worker are 2 and 3 of the machine, and 0 and 1 of what it sees.
    assert seated(2, machine(4, Share(1, 2)), False) == Seating("nccl", (0, 1))
    assert seated(2, machine(4), True) == Seating("nccl", (0, 1))  # nothing needs to be shared


def test_more_replicas_than_gpus_do_not_run_and_the_arithmetic_is_told() -> None:
    assert seated(4, machine(4, Share(0, 2)), False) == (
        "D=4 needs 4 GPUs, one a replica, and this worker owns 2 (4 GPUs // 2 workers = 2): "
        "pass -n 1, or --equiv-share-gpus runs it on gloo with shared GPUs"
    )
    assert seated(4, machine(2), False) == (
        "D=4 needs 4 GPUs, one a replica, and this worker owns 2 (2 GPUs // 1 workers = 2): "
        "--equiv-share-gpus runs it on gloo with shared GPUs"
    )


def test_replicas_that_share_gpus_meet_on_gloo_because_nccl_refuses_them() -> None:
    assert seated(4, machine(1), True) == Seating("gloo", (0, 0, 0, 0))
    assert seated(5, machine(2), True) == Seating("gloo", (0, 1, 0, 1, 0))


def test_a_worker_without_a_gpu_says_how_many_workers_there_may_be() -> None:
    found = seated(1, machine(2, Share(2, 3)), True)
    assert found == (
        "2 GPUs cannot be shared out to 3 pytest workers, of which each would own a GPU: "
        "pass -n 2 or fewer"
    )


@pytest.mark.parametrize("shared", [False, True])
def test_without_a_gpu_nothing_was_compared(shared: bool) -> None:
    assert seated(1, machine(0), shared) == "no CUDA device: nothing was compared"
    assert NO_DEVICE == "no CUDA device: nothing was compared"


def test_gpus_of_different_models_do_not_share_a_case() -> None:
    """Candidate and replay would run other kernels, and rounding would look like a fault."""
    found = seated(2, machine(2, models="AB"), False)
    assert isinstance(found, str)
    assert "model A, model B" in found
    assert seated(1, machine(2, models="AB"), False) == Seating("nccl", (0,))
    assert seated(2, machine(4, Share(1, 2), models="AABB"), False) == Seating("nccl", (0, 1))


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("0", "1")),
        ("2,5", ("2", "5")),
        ("2, 5, 7", ("2", "5")),  # as many as CUDA finds
        ("GPU-aa,GPU-bb", ("GPU-aa", "GPU-bb")),
    ],
)
def test_gpus_are_called_what_cuda_visible_devices_calls_them(
    visible: str | None, names: tuple[str, ...]
) -> None:
    assert visible_names(2, visible) == names
    assert visible_names(0, "") == ()


def test_the_share_is_what_the_plugin_left_in_the_environment() -> None:
    assert share_from({"EQUIVTEST_WORKER": "2/4"}) == Share(2, 4)
    assert share_from({}) == Share(0, 1)


def test_a_worker_that_replaces_a_lost_one_gets_its_share() -> None:
    """xdist calls it gw4, of four."""
    assert first_free([]) == 0
    assert first_free([0, 1, 2]) == 3
    assert first_free([3, 0, 2]) == 1
