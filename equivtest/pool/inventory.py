"""What a process finds when it looks for GPUs; asked in one that ends with its answer.

Looking initialises CUDA, and a process that has done so can fork no other that uses it.
"""

from __future__ import annotations

import os
from pathlib import Path

from equivtest.devices import Gpu, visible_names
from equivtest.pool.seat import Seat

_DRIVER = Path("/sys/module/nvidia/version")


def inventory(seat: Seat) -> tuple[tuple[Gpu, ...], dict[str, str]]:
    """The GPUs that this process sees, and what belongs into the record about them."""
    import torch

    count = torch.cuda.device_count()
    if not count:
        return (), {}
    names = visible_names(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    gpus = []
    for number, visible_as in enumerate(names):
        found = torch.cuda.get_device_properties(number)
        gpus.append(Gpu(visible_as, found.name, (found.major, found.minor)))
    return tuple(gpus), _facts()


def _facts() -> dict[str, str]:
    import torch

    return {
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "NCCL": _nccl(),
        "driver": _DRIVER.read_text().strip() if _DRIVER.is_file() else "unknown",
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", "not set"),
        "algorithms": "deterministic",
    }


def _nccl() -> str:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        return "not in this build of torch"
    return ".".join(map(str, torch.cuda.nccl.version()))
