"""The replay's average over replicas is gloo's and DistributedDataParallel's, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from bits import bits_equal, every_microbatch, own_wrapper
from torch import Tensor

from equivtest.arms.allreduce import chunks, ring_average, ring_sum
from equivtest.pool import Seat, current_pool

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SIZES = (1, 2, 3, 5, 7, 8, 17, 31, 64, 65, 1_000, 16_385, 65_537)
"""Elements: fewer than ranks, divided by D and not, and more than one segment for each rank."""


def drawn(elements: int, dtype: torch.dtype, ranks: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(elements)
    return [
        torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(ranks)
    ]


def differing(seat: Seat, sizes: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> int:
    """Elements in which the ring's sum is not what gloo gives this rank."""
    found = 0
    for dtype in dtypes:
        for elements in sizes:
            buffers = drawn(elements, dtype, seat.size)
            given = buffers[seat.rank].clone()
            dist.all_reduce(given)
            found += int((given != ring_sum(buffers)).sum())
    return found


@pytest.mark.parametrize("D", [2, 3, 4, 8])
def test_the_ring_adds_as_gloo_does(D: int) -> None:
    assert current_pool().run(differing, SIZES, DTYPES, D=D) == [0] * D


def test_the_ring_adds_as_gloo_does_in_segments_of_a_mebibyte() -> None:
    # 1,800,011 floats are 7.2 MB: 8 segments rounded up to 9 for three ranks.
    assert current_pool().run(differing, (1_800_011,), (torch.float32,), D=3) == [0] * 3


def test_a_buffer_of_seven_floats_has_two_chunks_for_three_ranks() -> None:
    # 28 bytes in 2 x 3 segments are 5 bytes each, rounded up to 8: two of them hold 4 floats.
    assert list(chunks(7, 4, 3)) == [(slice(0, 4), [2, 1, 0]), (slice(4, 7), [0, 2, 1])]


def test_another_order_than_that_of_the_ranks_loses_other_bits() -> None:
    # One float32, so rank 2 first, then 1, then 0: (-2^24 + 2^24) + 1. By rank 1 would be lost.
    parts = [torch.tensor([value]) for value in (1.0, 2.0**24, -(2.0**24))]
    assert ring_sum(parts).item() == 1.0
    assert (parts[0] + parts[1] + parts[2]).item() == 0.0


def test_complex_numbers_travel_as_two_floats() -> None:
    parts = [torch.complex(a, b) for a, b in [drawn(31, torch.float32, 2) for _ in range(3)]]
    found, pairs = ring_sum(parts), [torch.view_as_real(part).flatten() for part in parts]
    assert torch.equal(torch.view_as_real(found).flatten(), ring_sum(pairs))


def test_a_bucket_is_divided_by_a_product_or_in_place() -> None:
    # 1/3 in float32 is above a third: 5 x (1/3) is 1.6666667461 and 5 / 3 is 1.6666666269.
    five, like = torch.tensor([5.0]), [torch.zeros(1)]
    sums = [[five], [five * 0], [five * 0]]
    (product,) = ring_average(sums, like, [[False]] * 3)
    (division,) = ring_average(sums, like, [[True]] * 3)
    assert product is not None
    assert division is not None
    assert product.item() == pytest.approx(1.6666667461, abs=1e-10)
    assert division.item() == pytest.approx(1.6666666269, abs=1e-10)


def test_what_one_replica_lacks_counts_as_zeros_and_what_all_lack_takes_its_place() -> None:
    # The middle parameter has no gradient anywhere and still shifts what follows in the bucket.
    like = [torch.zeros(2), torch.zeros(3), torch.zeros(2, 2)]
    ones = [torch.ones(2), None, torch.ones(2, 2)]
    first, middle, last = ring_average([ones, [None, None, None]], like, [[False] * 3] * 2)
    assert first is not None
    assert first.tolist() == [0.5, 0.5]
    assert middle is None
    assert last is not None
    assert last.tolist() == [[0.5, 0.5], [0.5, 0.5]]


# -- through DistributedDataParallel


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("D", [2, 3, 4, 8])
def test_the_replay_gives_the_loops_bits(D: int, precision: str) -> None:
    assert bits_equal(D, precision) == [True] * 3


@pytest.mark.parametrize("megabytes", [0.0001, 0.002, 25])
def test_whatever_the_size_of_a_bucket(megabytes: float) -> None:
    assert bits_equal(4, "fp32", bucket_cap_mb=megabytes) == [True] * 3


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "fp16-mixed"])
def test_where_every_microbatch_reduces(precision: str, view: bool) -> None:
    found = bits_equal(3, precision, every_microbatch, gradient_as_bucket_view=view)
    assert found == [True] * 3


def test_where_some_replicas_do_not_use_a_layer() -> None:
    assert bits_equal(3, "bf16", sometimes=True, find_unused_parameters=True) == [True] * 3


def test_where_the_loop_brings_its_own_wrapper() -> None:
    assert bits_equal(3, "fp32", own_wrapper) == [True] * 3
