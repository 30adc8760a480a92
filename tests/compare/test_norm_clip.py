"""A clip by norm written by hand: accepted however it adds up the norm, and no further."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from equivtest.compare.norm_clip import HIDDEN, NormClip

BOUND = 0.01


def gradients(
    tensors: int, elements: int, dtype: torch.dtype, size: float = 0.05
) -> dict[str, Tensor]:
    """Normal numbers, of norm ``size`` over all tensors."""
    draw = torch.Generator().manual_seed(0)
    found = [
        torch.randn(elements, generator=draw, dtype=torch.float64) * 10 ** (k % 3)
        for k in range(tensors)
    ]
    norm = float(torch.cat(found).norm())
    return {str(k): (g * (size / norm)).to(dtype) for k, g in enumerate(found)}


def update(gradient: dict[str, Tensor], clipped: dict[str, Tensor], **more: Any) -> Any:
    given = {"clip_bounds": (), "norm_taken": False}
    return SimpleNamespace(gradient=gradient, clipped=clipped, **{**given, **more})


def by_torch(grads: list[Tensor]) -> float:
    return float(torch.stack([g.norm() for g in grads]).norm())


def by_squares(grads: list[Tensor]) -> float:
    return float(torch.stack([g.double().square().sum() for g in grads]).sum().sqrt())


@pytest.mark.parametrize("norm", [by_torch, by_squares])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
@pytest.mark.parametrize(("tensors", "elements"), [(40, 20), (2, 2_000_000)])
def test_any_norm_and_any_denominator_will_do(
    norm: Callable[[list[Tensor]], float], epsilon: float, tensors: int, elements: int
) -> None:
    # Of 2 million float32 elements torch's norm is some 700 u short; 1e-6 of 0.05 is 340 u.
    given = gradients(tensors, elements, torch.float32)
    factor = BOUND / (norm(list(given.values())) + epsilon)
    clip, seen = NormClip(BOUND), update(given, {n: g * factor for n, g in given.items()})
    assert clip.distance(seen) <= clip.tolerance(seen)


@pytest.mark.parametrize(("factor", "right"), [(1.0, True), (1.001, False)])
def test_sparse_gradients_that_torch_refuses_to_clip(factor: float, right: bool) -> None:
    # Rows 2 and 0, the first of them in two parts: (3 + 1, 3) has norm 5.
    rows, parts = torch.tensor([[2, 0, 2]]), torch.tensor([[3.0], [3.0], [1.0]])
    given = {"a": torch.sparse_coo_tensor(rows, parts, (4, 1), check_invariants=True)}
    clip, seen = NormClip(0.5), update(given, {"a": given["a"] * (factor * 0.1)})
    assert (clip.distance(seen) <= clip.tolerance(seen)) is right


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_tensors_in_another_order_have_the_same_norm(dtype: torch.dtype) -> None:
    given = gradients(600, 20, dtype)
    held = {n: torch.nn.Parameter(torch.zeros_like(g)) for n, g in given.items()}
    for name, parameter in held.items():
        parameter.grad = given[name].clone()
    clip_grad_norm_(list(held.values())[::-1], BOUND)
    clipped: Any = {n: p.grad for n, p in held.items()}
    clip, seen = NormClip(BOUND), update(given, clipped, clip_bounds=(BOUND,))
    assert clip.distance(seen) <= clip.tolerance(seen)


@pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_another_bound_is_seen(dtype: torch.dtype, off: float) -> None:
    given = gradients(4, 100, dtype)
    factor = BOUND * (1 + off) / by_squares(list(given.values()))
    clip, seen = NormClip(BOUND), update(given, {n: g * factor for n, g in given.items()})
    assert clip.distance(seen) > clip.tolerance(seen)


@pytest.mark.parametrize(
    ("dtype", "off", "clipped"),
    [
        # 8 x 2^-8 = 3.1e-2; a clip in bfloat16 alone rounds by 2.1 u = 8.2e-3
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 5e-2, False),
        (torch.float16, 2e-3, True),  # 8 x 2^-11 = 3.9e-3
        (torch.float32, 5e-4, True),  # 1e-3
        (torch.float32, 2e-3, False),
    ],
)
def test_a_norm_at_the_bound_is_the_clips_doing(
    dtype: torch.dtype, off: float, clipped: bool
) -> None:
    received = gradients(4, 1000, dtype, BOUND * (1 + off))
    told = NormClip(BOUND).received(update({}, received), gradients(4, 1000, dtype))
    assert told is not None
    assert told.note == (HIDDEN if clipped else "")
    # 0.01 of 0.05: the plan's gradient as the clip left it
    assert told.factor == pytest.approx(0.2 * (1 + off) if clipped else 1.0, rel=1e-3)
