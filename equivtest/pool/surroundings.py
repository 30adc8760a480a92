"""The environment that ranks are born in: what must be set before torch, CUDA or NCCL start."""

from __future__ import annotations

import sys
from collections.abc import Mapping

CUBLAS_WORKSPACE = ":4096:8"
"""With this, or ``:16:8``, cuBLAS gives the same bits twice; torch asks for it before it lets
deterministic algorithms use cuBLAS. Read when a cuBLAS handle is made."""

_GPU = {
    # torch.cuda.is_available() then asks NVML. It would initialise the driver instead, and where
    # that happens in the process that forks the ranks (an import may ask), no rank can use CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # NCCL's bootstrap listens on this interface, exactly; and there is no other machine to reach.
    "NCCL_SOCKET_IFNAME": "=lo",
    "NCCL_IB_DISABLE": "1",
    # A collective that hangs or fails is ended by the pool, which then says who waits for whom.
    # Torch's watchdog must not end a rank before, nor its monitor, nor either write files.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}

_NOT_TAKEN = frozenset({"NCCL_COMM_ID", "NCCL_NET"})
"""They would choose another way to meet than this machine's own interface."""


def surroundings(environ: Mapping[str, str], threads: int) -> dict[str, str]:
    """``environ`` with what the processes of a pool need.

    Ports are open to this machine only, and a workspace that somebody chose for cuBLAS is kept.
    """
    kept = {name: value for name, value in environ.items() if name not in _NOT_TAKEN}
    return {
        "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE,
        **kept,
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        **_GPU,
    }
