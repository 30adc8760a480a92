"""Precisions: numbers from the formats' definitions, and what torch cannot run."""

import pytest
import torch
from torch import nn

from equivtest.precision import (
    PRECISIONS,
    half_subnormal,
    optimizer_refusal,
    precision,
    refusal,
    unit_roundoff,
)

# Significand bits of IEEE 754-2019 table 3.5 (bfloat16: 8, with the implicit one): u = 2^-bits.
BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}

# Half the smallest subnormal, 2^(emin - bits + 1), with emin = -1022, -126, -14, -126.
HALF_SUBNORMAL = {
    torch.float64: -1022 - 52 - 1,
    torch.float32: -126 - 23 - 1,
    torch.float16: -14 - 10 - 1,
    torch.bfloat16: -126 - 7 - 1,
}


@pytest.mark.parametrize("dtype", BITS, ids=str)
def test_the_unit_roundoff_is_half_the_spacing_at_one(dtype: torch.dtype) -> None:
    u = unit_roundoff(dtype)
    assert u == 2.0 ** -BITS[dtype]
    one = torch.tensor(1.0, dtype=dtype)
    # A tie goes to the even neighbour; three quarters of the spacing go up.
    assert torch.tensor(1.0 + u, dtype=torch.float64).to(dtype) == one
    if dtype is not torch.float64:
        assert torch.tensor(1.0 + 1.5 * u, dtype=torch.float64).to(dtype) == 1.0 + 2 * u


@pytest.mark.parametrize("dtype", HALF_SUBNORMAL, ids=str)
def test_near_zero_rounding_is_half_the_smallest_subnormal(dtype: torch.dtype) -> None:
    # 2^-1075 is itself below float64's smallest number, and so reads as 0 there.
    assert half_subnormal(dtype) == 2.0 ** HALF_SUBNORMAL[dtype]


def test_below_half_the_smallest_subnormal_of_float16_there_is_only_zero() -> None:
    half = half_subnormal(torch.float16)
    assert torch.tensor(half, dtype=torch.float64).half() == 0.0
    assert torch.tensor(1.5 * half, dtype=torch.float64).half() == 2 * half


def test_a_complex_dtype_rounds_like_its_parts() -> None:
    assert unit_roundoff(torch.complex64) == 2.0**-24
    assert half_subnormal(torch.complex64) == 2.0**-150


def test_integers_have_no_unit_roundoff() -> None:
    with pytest.raises(ValueError, match=r"torch.int64 has no unit roundoff.*floating"):
        unit_roundoff(torch.int64)


@pytest.mark.parametrize(
    ("name", "parameters", "autocast", "scaled", "cap", "c"),
    [
        ("fp64", torch.float64, None, False, 1e-9, 4),
        ("fp32", torch.float32, None, False, 1e-3, 4),
        ("bf16", torch.bfloat16, None, False, 0.25, 1),
        ("bf16-mixed", torch.float32, torch.bfloat16, False, 0.25, 1),
        ("fp16-mixed", torch.float32, torch.float16, True, 0.1, 1),
    ],
)
def test_a_precision_is_what_the_design_says(
    name: str, parameters: torch.dtype, autocast: object, scaled: bool, cap: float, c: float
) -> None:
    found = precision(name)
    assert (found.parameters, found.autocast, found.scaled) == (parameters, autocast, scaled)
    assert (found.cap, found.kappa, found.c) == (cap, 4.0, c)


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_arithmetics_roundoff_is_that_of_the_forwards_dtype(name: str) -> None:
    found = precision(name)
    bits = 11 if name == "tf32" else BITS[found.autocast or found.parameters]
    assert found.u == 2.0**-bits


def test_an_unknown_precision_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"precision='float32': pass one of fp64, fp32, tf32"):
        precision("float32")


def test_a_mixed_precision_computes_in_its_low_dtype() -> None:
    layer = nn.Linear(2, 2)
    with precision("bf16-mixed").context("cpu"):
        assert layer(torch.ones(1, 2)).dtype is torch.bfloat16
    with precision("fp32").context("cpu"):
        assert layer(torch.ones(1, 2)).dtype is torch.float32


def test_tf32_wants_a_gpu() -> None:
    assert "CUDA" in str(refusal(precision("tf32"), "cpu"))
    assert refusal(precision("tf32"), "cuda") is None
    assert refusal(precision("fp32"), "cpu") is None


@pytest.mark.parametrize("name", ["tf32", "bf16", "bf16-mixed"])
def test_a_gpu_that_lacks_a_precision_is_told_with_what_it_has(name: str) -> None:
    # TF32 and bfloat16 came with compute capability 8.0; 7.5 is the last one before it.
    assert refusal(precision(name), "cuda", (7, 5)) == (
        f"{name} needs a GPU of compute capability 8.0 or more, and this one has 7.5"
    )
    assert refusal(precision(name), "cuda", (8, 0)) is None
    assert refusal(precision(name), "cuda", (10, 0)) is None


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16", "fp16-mixed"])
def test_the_other_precisions_run_on_any_gpu(name: str) -> None:
    assert refusal(precision(name), "cuda", (6, 0)) is None


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
def test_an_eps_that_is_zero_in_the_parameters_dtype_is_refused(optimizer) -> None:
    # 1e-8 is below half of float16's smallest number, 2^-25 = 3e-8.
    made = optimizer(nn.Linear(2, 2).half().parameters())
    assert f"{optimizer.__name__}'s eps=1e-08 is 0 in float16" in str(optimizer_refusal(made))


def test_an_eps_that_float16_holds_is_accepted() -> None:
    made = torch.optim.AdamW(nn.Linear(2, 2).half().parameters(), eps=1e-6)
    assert optimizer_refusal(made) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adams_own_eps_is_accepted_where_the_range_is_wide(dtype: torch.dtype) -> None:
    assert optimizer_refusal(torch.optim.AdamW(nn.Linear(2, 2).to(dtype).parameters())) is None


def test_an_optimizer_without_a_guard_is_accepted() -> None:
    assert optimizer_refusal(torch.optim.SGD(nn.Linear(2, 2).half().parameters(), lr=0.1)) is None
