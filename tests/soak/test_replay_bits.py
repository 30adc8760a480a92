"""The replay gives a right loop's bits: precisions, replicas, buckets, and two ways to reduce."""

from functools import partial

import pytest
from bits import bits_equal, every_microbatch

BUCKETS = (
    {"bucket_cap_mb": 0.0001},
    {"bucket_cap_mb": 0.001},
    {"bucket_cap_mb": 0.005},
    {"bucket_cap_mb": 25},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
)


@pytest.mark.parametrize("loop", [None, every_microbatch], ids=["last", "every"])
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16", "bf16-mixed", "fp16-mixed"])
@pytest.mark.parametrize("D", [2, 3, 4, 8])
def test_no_bit_differs(D: int, precision: str, loop) -> None:
    check = partial(bits_equal, D, precision, loop)
    assert [check(**how) for how in BUCKETS] == [[True] * 3] * len(BUCKETS)
