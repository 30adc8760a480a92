"""Keyed numbers have the distribution of the operator whose place they take."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from equivtest.isolate.random import draws
from equivtest.isolate.random.hashing import key_of, uniforms
from equivtest.isolate.random.keyed import Keyed

N = 1 << 14
SIGMAS = 5


def keyed(draw: Callable[[], Any]) -> Any:
    with Keyed(nn.Identity(), [], (5,)) as mode:
        drawn = draw()
    assert mode.unkeyed == []
    return drawn


def zeros(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(256, N // 256, dtype=dtype)


class TestHashing:
    def test_a_number_is_splitmix64_of_its_coordinates(self) -> None:
        """The same with Python's unbounded integers, shifts of which bring in no sign."""

        def mixed(x: int) -> int:
            x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
            return x ^ (x >> 31)

        golden, hashed = 0x9E3779B97F4A7C15, 12345
        for coordinate in (7, 2**64 - 3):  # -3
            hashed = mixed((hashed * golden + mixed((coordinate + golden) % 2**64)) % 2**64)
        found = uniforms(12345, [torch.tensor(7), torch.tensor([-3])])
        assert found.tolist() == [(hashed >> 11) / 2**53]

    def test_a_longer_axis_moves_no_number(self) -> None:
        rows = torch.arange(3).unsqueeze(1)
        short = uniforms(1, [rows, torch.arange(5)])
        assert torch.equal(uniforms(1, [rows, torch.arange(9)])[:, :5], short)

    def test_keys_are_the_same_in_every_process(self) -> None:
        assert key_of(0, 1, "blocks.0", 2) == key_of(0, 1, "blocks.0", 2)
        assert key_of(0, 1, "blocks.0", 2) != key_of(0, 1, "blocks.02", "")

    def test_numbers_are_uniform(self) -> None:
        """Kolmogorov and Smirnov's distance, below what one in a million exceeds: 2.69 / √n."""
        u = keyed(lambda: torch.rand(N, dtype=torch.float64)).sort().values
        steps = torch.arange(N, dtype=torch.float64) / N
        distance = max(float((u - steps).max()), float((steps + 1 / N - u).max()))
        assert distance < 2.69 / math.sqrt(N)

    def test_float32_never_rounds_up_to_one(self) -> None:
        drawn = keyed(lambda: torch.rand(1 << 20, dtype=torch.float32))
        assert drawn.max() <= 1 - 2**-24


SQRT_E = math.exp(0.5)
MOMENTS: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    # mean and variance: of the distributions' definitions
    "uniform_": (lambda: zeros().uniform_(1, 3), 2, 4 / 12),
    "rand": (lambda: torch.rand(256, N // 256, dtype=torch.float64), 1 / 2, 1 / 12),
    "rand in float32": (lambda: torch.rand(256, N // 256), 1 / 2, 1 / 12),
    "rand_like": (lambda: torch.rand_like(zeros()), 1 / 2, 1 / 12),
    "rand out": (lambda: torch.rand(256, N // 256, out=torch.empty(0)), 1 / 2, 1 / 12),
    "randn": (lambda: torch.randn(256, N // 256), 0, 1),
    "randn_like": (lambda: torch.randn_like(zeros()), 0, 1),
    "normal_": (lambda: zeros().normal_(2, 3), 2, 9),
    "normal of means": (lambda: torch.normal(zeros(), 3.0), 0, 9),
    "normal of deviations": (lambda: torch.normal(1.0, zeros() + 2), 1, 4),
    "normal of both": (lambda: torch.normal(zeros() + 1, torch.ones(1, N // 256)), 1, 1),
    "normal of a size": (lambda: torch.normal(1.0, 2.0, (256, N // 256)), 1, 4),
    "log_normal_": (lambda: zeros().log_normal_(0, 1), SQRT_E, math.e * (math.e - 1)),
    "exponential_": (lambda: zeros().exponential_(2), 1 / 2, 1 / 4),
    "geometric_": (lambda: zeros().geometric_(0.25), 4, 12),
    "bernoulli": (lambda: torch.bernoulli(zeros() + 0.3), 0.3, 0.21),
    "bernoulli_": (lambda: zeros().bernoulli_(0.3), 0.3, 0.21),
    "bernoulli_ of chances": (lambda: zeros().bernoulli_(zeros() + 0.3), 0.3, 0.21),
    "bernoulli_ of bools": (lambda: zeros(torch.bool).bernoulli_(0.3), 0.3, 0.21),
    "randint": (lambda: torch.randint(3, 8, (256, N // 256)), 5, 2),
    "randint_like": (lambda: torch.randint_like(zeros(), 5), 2, 2),
    "random_": (lambda: zeros(torch.int64).random_(3, 8), 5, 2),
    "random_ of bytes": (lambda: zeros(torch.uint8).random_(), 127, (255**2 - 1) / 12),
    "poisson": (lambda: torch.poisson(zeros() + 3.5), 3.5, 3.5),
    "poisson of many": (lambda: torch.poisson(zeros() + 1e4), 1e4, 1e4),
    "binomial": (lambda: torch.binomial(zeros() + 7, zeros() + 0.3), 2.1, 1.47),
    "native_dropout": (lambda: torch.native_dropout(zeros() + 1, 0.2, True)[0], 1, 0.25),
    "multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(256, 3), 256, True),
        1.5,
        0.75,
    ),
    "first of multinomial": (
        lambda: torch.multinomial(torch.tensor([1.0, 0.0, 3.0]).expand(N, 3), 1),
        1.5,
        0.75,
    ),
    "generator": (lambda: torch.rand(256, N // 256, generator=torch.Generator()), 1 / 2, 1 / 12),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance(name: str) -> None:
    draw, mean, variance = MOMENTS[name]
    real, drawn = draw(), keyed(draw)
    assert (drawn.dtype, drawn.shape) == (real.dtype, real.shape)
    values = drawn.double().flatten()
    assert abs(values.mean() - mean) < SIGMAS * math.sqrt(variance / N)
    centred = (values - mean) ** 2
    assert abs(centred.mean() - variance) < SIGMAS * float(centred.std()) / math.sqrt(N)


def test_quartiles_of_cauchy() -> None:
    """At median and median ± scale; a quantile's deviation is √(p(1−p)/n) over its density."""
    values = keyed(lambda: zeros().cauchy_(1, 2)).flatten()
    found = torch.quantile(values, torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64))
    for value, expected, p in zip(found.tolist(), (-1, 1, 3), (0.25, 0.5, 0.75), strict=True):
        density = 1 / (2 * math.pi * (1 + ((expected - 1) / 2) ** 2))
        assert abs(value - expected) < SIGMAS * math.sqrt(p * (1 - p) / N) / density


def test_a_permutation_is_one() -> None:
    assert sorted(keyed(lambda: torch.randperm(100)).tolist()) == list(range(100))


def test_rrelu_keeps_what_is_positive_and_its_noise() -> None:
    """Slopes between 1/8 and 1/3: of mean 11/48."""
    x, noise = torch.linspace(-1, 1, N, dtype=torch.float64), zeros().flatten()
    out = keyed(lambda: torch.ops.aten.rrelu_with_noise(x, noise, 1 / 8, 1 / 3, True))
    assert torch.equal(out, x * noise)
    assert (noise[x > 0] == 1).all()
    slopes = noise[x <= 0]
    assert 1 / 8 <= slopes.min()
    assert slopes.max() < 1 / 3
    assert abs(slopes.mean() - 11 / 48) < SIGMAS * (5 / 24) / math.sqrt(12 * N / 2)


def test_a_rate_without_end_ends() -> None:
    """Beyond 2^53, float64 has no two numbers that are 1 apart."""
    drawn = keyed(lambda: torch.poisson(torch.tensor([1.0, 1e30, math.inf, math.nan])))
    assert drawn[1] > 2**50


def test_what_draws_nothing_stays() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(keyed(lambda: torch.native_dropout(x, 0.5, False)[0]), x)
    assert torch.equal(keyed(lambda: nn.RReLU().eval()(x)), nn.RReLU().eval()(x))
    assert keyed(lambda: torch.rand(0)).shape == (0,)


WITHOUT_KEY = {
    "_cudnn_init_dropout_state",
    "_cudnn_rnn",
    "_efficient_attention_forward",
    "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace",
    "_sample_dirichlet",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
    "_standard_gamma",
    "miopen_rnn",
    "normal_functional",
    "rrelu_with_noise_functional",
}
"""Fused kernels with counters of their own, the gamma distribution, and what only a compiler calls:
they are said.
"""

COMPOSITE = {"alpha_dropout", "dropout", "gru", "lstm", "rnn_relu", "rnn_tanh"}
"""Made of the others before a dispatcher mode sees them."""


def test_every_random_operator_of_torch_is_known() -> None:
    unknown = set()
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        for overload in packet.overloads() if hasattr(packet, "overloads") else ():
            operator = getattr(packet, overload)
            if draws.may_draw(operator) and not draws.is_known(operator):
                unknown.add(name)
    assert unknown - COMPOSITE - WITHOUT_KEY == set()
