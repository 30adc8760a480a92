"""Models and random numbers, built the same way in every process and arm."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from equivtest.arguments import a
from equivtest.calling import ExperimentError, calling
from equivtest.experiment import Experiment


def seed_everything(seed: int, replica: int = 0) -> None:
    """Seed torch, numpy and random; each replica draws numbers of its own."""
    mixed = (seed * 1_000_003 + replica) % 2**32
    # Not torch.manual_seed: it asks every backend, and formats stack traces on the way.
    torch.default_generator.manual_seed(mixed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(mixed)
    np.random.seed(mixed)
    random.seed(mixed)


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms, and no time spent on filling uninitialised memory."""
    before = torch.are_deterministic_algorithms_enabled()
    settings: Any = torch.utils.deterministic
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        settings.fill_uninitialized_memory = fill


def build(experiment: Experiment, dtype: torch.dtype, device: str = "cpu") -> nn.Module:
    """The experiment's model under its seed, with floating parameters and buffers in ``dtype``.

    Raises:
        ExperimentError: the factory raised, gave something else than a module, or a module without
            trainable parameters.
    """
    seed_everything(experiment.seed)
    with calling("model()"):
        module = experiment.model()
    if not isinstance(module, nn.Module):
        raise ExperimentError(f"model() returned {a(module)}: return a torch.nn.Module")
    lazy = [name for name, p in module.named_parameters() if is_lazy(p)]
    if lazy:
        raise ExperimentError(
            f"model() returned {a(module)} whose {lazy[0]!r} has no shape yet: give lazy modules "
            "their sizes, or run one forward in the factory"
        )
    _cast(module.to(device), dtype)
    if not any(p.requires_grad for p in module.parameters()):
        raise ExperimentError(
            f"model() returned {a(module)} without trainable parameters: return a module with "
            "parameters that require a gradient; nothing can be compared without"
        )
    return module


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating parameters and buffers, complex ones to the dtype's complex twin.

    ``Module.to`` would drop the imaginary parts.
    """
    for held in (*module.parameters(), *module.buffers()):
        if held.is_complex():
            held.data = held.data.to(dtype.to_complex())
        elif held.is_floating_point():
            held.data = held.data.to(dtype)


@contextmanager
def quiet_schedulers() -> Iterator[None]:
    """Schedulers are moved here without the optimizer calls that they expect to see."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        yield
