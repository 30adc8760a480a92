"""What a job may leave behind in its process that would change the next one, and cannot be undone.

Loops patch functions, register hooks for all modules, flip backend flags and start threads. A
process in which something of that is left is not used again.
"""

from __future__ import annotations

import builtins
import contextlib
import itertools
import operator
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy.random
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.nn.modules.module as module_module
import torch.optim.optimizer as optimizer_module
import torch.utils.checkpoint
import torch.utils.data
from torch.nn.parallel import DistributedDataParallel

from equivtest.pool.byvalue import travels_by_value

# A thread that is about to end (of a closed queue, say) may take this long.
_GRACE_S = 0.05

# What Python adds to a class when it is first copied or asked for its annotations, and what
# torch.compile adds to `Module`.
_ADDED_LAZILY = {
    "__slotnames__",
    "__annotations__",
    "__annotations_cache__",
    "___needs_generation_tag_patch",
}

# Torch wraps some of its own functions at their first use: every optimizer's `step`, what
# torch.compile must not enter, and `Module.__init__` for torch.compile.
_WRAPPERS = ("torch.optim.optimizer", "torch._dynamo.eval_frame", "torch._dynamo.mutation_guard")

_MODULES = (
    builtins,
    random,
    numpy.random,
    torch,
    torch.amp,
    torch.autograd,
    torch.autograd.graph,
    torch.linalg,
    torch.nn,
    torch.nn.functional,
    torch.nn.init,
    torch.nn.modules,
    torch.nn.utils,
    torch.nn.utils.clip_grad,
    torch.optim,
    torch.optim.lr_scheduler,
    torch.optim.swa_utils,
    torch.utils.checkpoint,
    torch.utils.data,
    dist,
    c10d,
)

_FLAGS: tuple[Callable[[], Any], ...] = tuple(
    getattr(owner, name)
    for owner, names in (
        (
            torch._C,
            "_get_mkldnn_enabled _get_mkldnn_deterministic _get_nnpack_enabled "
            "_get_cudnn_enabled _get_cudnn_benchmark _get_cudnn_deterministic "
            "_get_cublas_allow_fp16_reduced_precision_reduction "
            "_get_cublas_allow_bf16_reduced_precision_reduction "
            "_get_cublas_allow_fp16_accumulation _get_flash_sdp_enabled _get_math_sdp_enabled "
            "_get_mem_efficient_sdp_enabled _get_cudnn_sdp_enabled "
            "_is_multithreading_enabled _len_torch_function_stack _len_torch_dispatch_stack",
        ),
        (torch, "is_anomaly_enabled is_inference_mode_enabled"),
        (sys, "gettrace getprofile"),
    )
    for name in names.split()
    if hasattr(owner, name)
)


class Footprint:
    """The process as it was when this was made; `left` says what is different now."""

    def __init__(self) -> None:
        self._owners = list(_owners())
        self.accept()

    def left(self) -> str:
        """What a job has left behind, in words; empty if the process is as it was."""
        return self._changed_name() or self._changed_setting() or self._new_thread()

    def accept_imports(self, modules_before: int) -> None:
        """Take what a library has changed while it was imported for a part of the process."""
        if len(sys.modules) != modules_before and self.left():
            self.accept()

    def accept(self) -> None:
        """Take the process as it is now for what a job finds."""
        self._spaces = [_Names(owner) for owner in self._owners]
        self._get = [space.get for space in self._spaces]
        self._values = list(itertools.chain.from_iterable(s.values for s in self._spaces))
        self._hooks = _hooks()
        self._settings = _settings()
        self._threads = set(threading.enumerate())

    def _changed_name(self) -> str:
        now = itertools.chain.from_iterable(
            map(get, space.names) for get, space in zip(self._get, self._spaces, strict=True)
        )
        same = all(map(operator.is_, now, self._values))
        if same and all(space.size == len(space.namespace) for space in self._spaces):
            return ""
        changed = next((name for space in self._spaces for name in space.changed()), "")
        self._values = list(itertools.chain.from_iterable(s.values for s in self._spaces))
        return changed

    def _changed_setting(self) -> str:
        if _hooks() != self._hooks:
            return "a hook for all modules or optimizers"
        return "" if _settings() == self._settings else "a flag of a backend or of the process"

    def _new_thread(self) -> str:
        for thread in threading.enumerate():
            # Threads of C++ that once ran Python have a dummy here, which stays.
            if thread not in self._threads and not isinstance(thread, threading._DummyThread):
                thread.join(_GRACE_S)
                if thread.is_alive():
                    return f"a thread ({thread.name})"
        return ""


class _Names:
    """The names of one module or class, and what they stood for."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.namespace: Mapping[str, Any] = vars(owner)
        self.get = self.namespace.get
        self._is_class = isinstance(owner, type)
        self._path = (
            f"{owner.__module__}.{owner.__qualname__}" if self._is_class else owner.__name__
        )
        kept = [(k, v) for k, v in self.namespace.items() if self._is_class or callable(v)]
        self.names = [name for name, _ in kept]
        self.values = [value for _, value in kept]
        self.size = len(self.namespace)

    def changed(self) -> Iterator[str]:
        """What a job has changed; what torch or Python changed is taken note of."""
        for i, (name, value) in enumerate(zip(self.names, self.values, strict=True)):
            now = self.get(name)
            if now is not value and not self._is_lazy(name, now, value):
                yield f"{self._path}.{name}"
            self.values[i] = now
        if self._is_class:  # a name added to a class can hide an inherited one
            for name in sorted(self.namespace.keys() - set(self.names)):
                now = self.get(name)
                if not (self._is_lazy(name, now, self._inherited(name)) or self._is_own(name, now)):
                    yield f"{self._path}.{name}"
                self.names.append(name)
                self.values.append(now)
        self.size = len(self.namespace)

    @staticmethod
    def _is_lazy(name: str, now: Any, before: Any) -> bool:
        return name in _ADDED_LAZILY or _bare(now) is _bare(before)

    def _is_own(self, name: str, now: Any) -> bool:
        """A public name that an installed library adds for itself: nothing before it asked for it.

        transformers adds ``Module.smart_apply`` with its first model, and takes seconds to import
        in the ranks that would replace these.
        """
        if name.startswith("_") or self._inherited(name) is not None:
            return False
        module = getattr(now, "__module__", None)
        known = hasattr(sys.modules.get(module or ""), "__file__")
        return known and module is not None and not travels_by_value(module)

    def _inherited(self, name: str) -> Any:
        spaces = (vars(base) for base in self.owner.__mro__[1:])
        return next((space[name] for space in spaces if name in space), None)


def _bare(function: Any) -> Any:
    """The function without what torch itself has wrapped around it."""
    while isinstance(function, types.FunctionType):
        if function.__globals__.get("__name__") not in _WRAPPERS:
            break
        inner = getattr(function, "__wrapped__", None) or _enclosed(function)
        if inner is None:
            break
        function = inner
    return function


def _enclosed(wrapper: types.FunctionType) -> Any:
    contents = (cell.cell_contents for cell in wrapper.__closure__ or ())
    return next((c for c in contents if isinstance(c, types.FunctionType)), None)


def _owners() -> Iterator[Any]:
    yield from _MODULES
    classes: dict[type, None] = dict.fromkeys((DistributedDataParallel, torch.autocast))
    for module in (torch.nn, torch.optim, torch.optim.lr_scheduler, torch.amp, torch.utils.data):
        classes.update(dict.fromkeys(v for v in vars(module).values() if isinstance(v, type)))
    classes.update(dict.fromkeys((torch.Tensor, torch.nn.Parameter, torch.autograd.Function)))
    bases: dict[type, None] = dict.fromkeys(base for c in classes for base in c.__mro__)
    yield from (base for base in bases if base.__module__.partition(".")[0] == "torch")


def _hooks() -> list[Any]:
    return [list(v.values()) if isinstance(v, dict) else v for v in _hook_tables()]


def _hook_tables() -> Iterable[Any]:
    for module in (module_module, optimizer_module):
        for name, value in vars(module).items():
            if name.startswith("_global_") and not callable(value):
                yield value


def _settings() -> list[Any]:
    values = [flag() for flag in _FLAGS]
    with contextlib.suppress(Exception):  # torch raises where its old and new names were mixed
        values += [torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32]
    values.append(_SMALLEST_NORMAL / 2 > 0)  # what set_flush_denormal changes
    values.append(signal.getitimer(signal.ITIMER_REAL)[0] > 0)
    return values


_SMALLEST_NORMAL = sys.float_info.min
