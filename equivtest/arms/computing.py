"""What a case computes with on its device, in ranks and reference arms alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from equivtest.arms.build import deterministic
from equivtest.arms.case import Case


@contextmanager
def computing(case: Case) -> Iterator[None]:
    """Deterministic algorithms and, on a GPU, the case's arithmetic for float32."""
    with deterministic():
        if case.device != "cuda":
            yield
            return
        torch.cuda.init()  # before the first seed: there is nothing to be seeded until then
        with float32_arithmetic(tf32=case.precision.name == "tf32"):
            yield


@contextmanager
def float32_arithmetic(*, tf32: bool) -> Iterator[None]:
    """TF32 in products and convolutions of float32, or in neither, and kernels chosen by no clock.

    Torch's own default is neither: TF32 in convolutions, and float32 in products. By the older of
    its two interfaces, which sets both and which ``set_float32_matmul_precision`` belongs to; torch
    raises where they are mixed.
    """
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark
    matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = tf32, tf32, False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = before


def device_of(case: Case) -> torch.device:
    """The device of this process: its current GPU, with its number, or the CPU."""
    if case.device == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(case.device)


def in_ddp(module: nn.Module, device: torch.device) -> nn.Module:
    """The default wrapper, bound to the one GPU that the module is on."""
    return DistributedDataParallel(module, [device.index] if device.type == "cuda" else None)
