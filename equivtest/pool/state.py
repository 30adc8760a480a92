"""The global state of a process that a job may change, and its way back."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import torch

from equivtest.pool import gpu


class ProcessState:
    """What the process had at its start: random numbers, defaults, environment."""

    def __init__(self) -> None:
        random.seed(0)
        torch.manual_seed(0)
        self._random = random.getstate()
        self._torch = torch.get_rng_state()
        self._numpy: Any = None
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(0)
            self._numpy = sys.modules["numpy"].random.get_state()
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._deterministic = _deterministic()
        self._environment = dict(os.environ)

    def restore(self) -> None:
        random.setstate(self._random)
        torch.set_rng_state(self._torch)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        if _deterministic() != self._deterministic:
            enabled, warn_only = self._deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.set_grad_enabled(True)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.set_autocast_cache_enabled(True)
        gpu.restore()
        self._restore_environment()

    def _restore_environment(self) -> None:
        now = dict(os.environ)
        if now == self._environment:
            return
        for name in now.keys() - self._environment.keys():
            del os.environ[name]
        for name, value in self._environment.items():
            if now.get(name) != value:
                os.environ[name] = value


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def set_rank_environment(rank: int, size: int) -> None:
    """The variables that `torchrun` would set; torch's rendezvous by address is never used."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        GROUP_RANK="0",
        NODE_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
    )
