"""The random numbers that a forward can draw from: torch's, numpy's and Python's generators."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the three global generators of a process (torch's on the CPU)."""

    torch: Tensor
    numpy: Any
    python: Any

    @classmethod
    def now(cls) -> RandomState:
        return cls(torch.get_rng_state(), np.random.get_state(), random.getstate())

    def moved(self) -> bool:
        """Whether a number has been drawn since."""
        now = RandomState.now()
        return not (
            torch.equal(self.torch, now.torch)
            and self.python == now.python
            and self.numpy[2:] == now.numpy[2:]
            and bool((self.numpy[1] == now.numpy[1]).all())
        )

    def restore(self) -> None:
        """Draw from here on as then."""
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)
