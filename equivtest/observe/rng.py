"""The random numbers that a forward can draw from: torch's, numpy's and Python's generators."""

from __future__ import annotations

import _random
import ctypes
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

GENERATORS = frozenset({"torch", "cuda", "python", "numpy"})

_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: 624 words of key and a position


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the global generators of a process.

    ``cuda`` is that of the current GPU (seed and offset, on the host), where the process uses one:
    it gives the same numbers on any GPU of the same model.
    """

    torch: Tensor
    numpy: Any
    python: Any
    cuda: Tensor | None = None

    @classmethod
    def now(cls) -> RandomState:
        # Asking would initialise CUDA where it is not.
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return cls(torch.get_rng_state(), _numpy.now(), _python.now(), cuda)

    def moved(self) -> bool:
        """Whether a number has been drawn since."""
        return bool(self.drawn())

    def drawn(self) -> frozenset[str]:
        """The generators (names of attributes) that a number has been drawn from since."""
        return GENERATORS - self.same(RandomState.now())

    def same(self, other: RandomState) -> frozenset[str]:
        """The generators that give the same numbers from here on as from ``other``.

        A GPU's is one of them where neither process uses one.
        """
        alike = {
            "torch": torch.equal(self.torch, other.torch),
            "cuda": _equal(self.cuda, other.cuda),
            "python": self.python is other.python or self.python == other.python,
            "numpy": _same_numpy(self.numpy, other.numpy),
        }
        return frozenset(name for name, equal in alike.items() if equal)

    def restore(self) -> None:
        """Draw from here on as then."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda)
        _numpy.restore(self.numpy)
        _python.restore(self.python)


class _Kept:
    """A state that takes longer to read than a small forward: read again where it moved.

    The memory of the generator tells (None: it cannot). What is in store of a pair of normal
    numbers can be drawn without moving it.
    """

    def __init__(
        self,
        memory: Callable[[], object],
        read: Callable[[], Any],
        write: Callable[[Any], None],
        in_store: Callable[[Any], bool],
    ) -> None:
        self._memory, self._read, self._in_store = memory, read, in_store
        self._write = write
        self._seen: object = None
        self._state: Any = None

    def now(self) -> Any:
        memory = self._memory()
        if memory is None or memory != self._seen or self._in_store(self._state):
            self._seen, self._state = memory, self._read()
        return self._state

    def restore(self, state: Any) -> None:
        """Back to ``state``, which may have another number in store than the one seen last."""
        self._write(state)
        self._seen = None


def _numpy_memory() -> bytes | None:
    generator = _numpys_own()
    if generator is None:
        return None
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def _numpys_own() -> Any:
    """The generator of the global functions; None if one of another kind is in its place."""
    generator: Any = np.random.mtrand.get_bit_generator()
    return generator if isinstance(generator, np.random.MT19937) else None


def _numpy_state() -> Any:
    """A tuple, or from a generator of another kind a dict."""
    return np.random.get_state() if _numpys_own() else np.random.get_state(legacy=False)


def _python_memory() -> bytes | None:
    """What `random`'s generator holds behind the head that all objects have."""
    if sys.implementation.name != "cpython":
        return None
    return ctypes.string_at(id(random._inst) + _HEAD_BYTES, _PYTHON_BYTES)


_HEAD_BYTES = object.__basicsize__
_PYTHON_BYTES = _random.Random.__basicsize__ - _HEAD_BYTES

_numpy = _Kept(_numpy_memory, _numpy_state, np.random.set_state, lambda state: bool(state[3]))
_python = _Kept(
    _python_memory, random.getstate, random.setstate, lambda state: state[2] is not None
)


def _same_numpy(a: Any, b: Any) -> bool:
    return a is b or pickle.dumps(a) == pickle.dumps(b)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return b is None if a is None else b is not None and torch.equal(a, b)
