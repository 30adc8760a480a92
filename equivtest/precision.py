"""Precisions: what each computes in, how much rounding it brings, and what torch cannot run in it.

``u`` is the unit roundoff, half the spacing at 1: 2**-53, 2**-24, 2**-11 (float16, TF32), 2**-8
(bfloat16). IEEE 754-2019 table 3.5; TF32 and bfloat16 by their 10 and 7 stored significand bits.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

UNIT_ROUNDOFF: dict[torch.dtype, float] = {
    torch.float64: 2.0**-53,
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}


def unit_roundoff(dtype: torch.dtype) -> float:
    """Unit roundoff of a floating or complex dtype.

    Raises:
        ValueError: the dtype has none.
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    if real not in UNIT_ROUNDOFF:
        raise ValueError(f"{dtype} has no unit roundoff here: pass a floating dtype")
    return UNIT_ROUNDOFF[real]


def half_subnormal(dtype: torch.dtype) -> float:
    """Half the smallest positive number of a floating or complex dtype: the rounding near zero."""
    real = dtype.to_real() if dtype.is_complex else dtype
    return torch.finfo(real).smallest_normal * torch.finfo(real).eps / 2


@dataclass(frozen=True)
class Precision:
    """How a case computes.

    Attributes:
        name: as users write it.
        parameters: dtype of parameters, gradients and floating inputs.
        autocast: dtype of the forward under autocast, or none.
        u: unit roundoff of the arithmetic.
        cap: largest noise floor at which a tensor is still judged against the oracle.
        kappa: noise floors that comparison C allows.
        c: unit roundoffs that the noise floor is at least.
        scaled: the loss is scaled (GradScaler).
    """

    name: str
    parameters: torch.dtype
    autocast: torch.dtype | None
    u: float
    cap: float
    kappa: float = 4.0
    c: float = 1.0
    scaled: bool = False

    def context(self, device: str) -> AbstractContextManager[Any]:
        """The autocast context of a forward on ``device``."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device, dtype=self.autocast)


PRECISIONS: dict[str, Precision] = {
    p.name: p
    for p in (
        Precision("fp64", torch.float64, None, 2.0**-53, cap=1e-9, c=4.0),
        Precision("fp32", torch.float32, None, 2.0**-24, cap=1e-3, c=4.0),
        Precision("tf32", torch.float32, None, 2.0**-11, cap=0.1),
        Precision("bf16", torch.bfloat16, None, 2.0**-8, cap=0.25),
        Precision("fp16", torch.float16, None, 2.0**-11, cap=0.1),
        Precision("bf16-mixed", torch.float32, torch.bfloat16, 2.0**-8, cap=0.25),
        Precision("fp16-mixed", torch.float32, torch.float16, 2.0**-11, cap=0.1, scaled=True),
    )
}


def precision(name: str) -> Precision:
    """The precision called ``name``.

    Raises:
        ValueError: there is none; lists those there are.
    """
    if not isinstance(name, str) or name not in PRECISIONS:
        raise ValueError(f"precision={name!r}: pass one of {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


AMPERE = (8, 0)
"""The compute capability that TF32 and bfloat16 arithmetic came with. Older GPUs compute float32
where TF32 is asked for, and emulate bfloat16: another arithmetic under the same name."""


def refusal(
    precision: Precision, device: str, capability: tuple[int, int] | None = None
) -> str | None:
    """Why ``precision`` cannot run on ``device`` at all, or None.

    Args:
        capability: of the GPU.
    """
    if precision.name == "tf32" and device != "cuda":
        return "tf32 needs a CUDA device: it is a mode of the GPU's float32 matrix units"
    low = torch.bfloat16 in (precision.parameters, precision.autocast)
    if capability is not None and capability < AMPERE and (low or precision.name == "tf32"):
        major, minor = capability
        return (
            f"{precision.name} needs a GPU of compute capability {AMPERE[0]}.{AMPERE[1]} or more, "
            f"and this one has {major}.{minor}"
        )
    return None


def optimizer_refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Why ``optimizer`` cannot compute in its parameters' dtype, or None.

    A denominator guard that rounds to zero divides by zero where a second moment is zero: Adam's
    default eps of 1e-8 is below the smallest float16 (2**-24, about 6e-8).
    """
    for group in optimizer.param_groups:
        eps = group.get("eps")
        if not isinstance(eps, float) or eps == 0:
            continue
        for parameter in group["params"]:
            if parameter.is_floating_point() and not torch.tensor(eps, dtype=parameter.dtype):
                return (
                    f"{type(optimizer).__name__}'s eps={eps:g} is 0 in {str(parameter.dtype)[6:]}: "
                    "the update divides by zero"
                )
    return None
