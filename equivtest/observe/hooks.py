"""Hooks that belong to one module: a copy of it carries them and does not report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils.checkpoint import CheckpointFunction


class ModuleHook:
    """Calls ``call`` for ``module`` alone; itself in a deep copy, nothing in a pickle."""

    def __init__(self, module: nn.Module, call: Callable[..., None]) -> None:
        self._module = module
        self._call = call

    def __call__(self, module: nn.Module, *args: Any) -> None:
        if module is self._module:
            with outside_transforms():
                self._call(*args)

    def __deepcopy__(self, memo: Any) -> ModuleHook:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_nothing, ()


def _nothing(*_: Any) -> None:
    """What a hook is once it has been read back."""


def _hook_of_nothing() -> Callable[..., None]:
    return _nothing


def recomputing() -> bool:
    """Whether a backward runs now and a forward in it repeats one that was seen.

    A reentrant checkpoint runs its function without gradients first, which is not seen; its forward
    inside the backward is then the only one.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CheckpointFunction.backward.__code__:
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return True


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Leave the transforms of ``torch.func`` for a while: what is made here is no tensor of one."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        yield
        return
    with temporarily_clear_interpreter_stack():
        yield


def in_transform(tensor: Tensor) -> bool:
    """Whether a transform of ``torch.func`` made the tensor: it has no memory and takes no hook."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor that a transform of ``torch.func`` was given."""
    while in_transform(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor
