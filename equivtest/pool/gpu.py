"""The GPU of one process of the pool: taking it, and waiting until it has nothing left to do."""

from __future__ import annotations

import contextlib

import torch

from equivtest.devices import Seating


def of_rank(seating: Seating, rank: int) -> torch.device | None:
    """The rank's GPU, as this process numbers those that it sees; None on the CPU."""
    return torch.device("cuda", seating.gpus[rank]) if seating.gpus else None


def take(device: torch.device) -> None:
    """Make ``device`` the current one of this process, and initialise CUDA on it.

    Before the process group is made: NCCL makes its communicator on the current device.

    Raises:
        RuntimeError: the process that forked this one has already used CUDA, or torch cannot.
    """
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError(
            "the process that forks the ranks has initialised CUDA while it imported torch, and no "
            "process forked after that can use it: is PYTORCH_NVML_BASED_CUDA_CHECK=0 set, or NVML "
            "(libnvidia-ml.so.1) missing?"
        )
    torch.cuda.set_device(device)
    torch.cuda.init()


def finish(device: torch.device | None) -> None:
    """Wait for what a job has started on the device.

    A collective that no other rank answers then hangs here, in the time of the job that it belongs
    to; in the next one it would be answered by a collective that it has nothing to do with.
    """
    if device is not None:
        torch.cuda.synchronize(device)


def restore() -> None:
    """Random numbers and autocast as at the start; memory that torch keeps goes to others."""
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cuda", torch.float16)
    if torch.cuda.is_initialized():
        # After a failed kernel every call fails; the pool replaces the process.
        with contextlib.suppress(RuntimeError):
            torch.cuda.manual_seed(0)
            torch.cuda.empty_cache()  # rank 0 and the reference arms share a GPU
