"""The random numbers that a forward can draw from: torch's, numpy's and Python's generators."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MT19937_BYTES = 625 * 4  # numpy's mt19937_state: 624 words of key and a position


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the three global generators of a process (torch's on the CPU)."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        return cls(torch.get_rng_state(), _numpy.now(), random.getstate())

    def moved(self) -> bool:
        """Whether a number has been drawn since."""
        now = RandomState.now()
        return not (
            torch.equal(self.torch, now.torch)
            and self.python == now.python
            and _same_numpy(self.numpy, now.numpy)
        )

    def restore(self) -> None:
        """Draw from here on as then."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


class _Numpy:
    """numpy's state, which takes longer to read than a small forward: read again where it moved.

    The generator's own memory tells. Only the second half of a pair of normal numbers is drawn
    without moving it: where one is in store, the state is read anew.
    """

    def __init__(self) -> None:
        self._memory = b""
        self._state: Any = None

    def now(self) -> Any:
        generator: Any = np.random.mtrand.get_bit_generator()
        if not isinstance(generator, np.random.MT19937):
            return np.random.get_state()
        memory = ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)
        if self._state is None or memory != self._memory or self._state[3]:
            self._memory, self._state = memory, np.random.get_state()
        return self._state


_numpy = _Numpy()


def _same_numpy(a: Any, b: Any) -> bool:
    return a is b or (a[2:] == b[2:] and bool((a[1] == b[1]).all()))
