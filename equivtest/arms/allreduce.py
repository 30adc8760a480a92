"""The order in which gloo's all-reduce adds, float by float. Pure.

gloo's ring (``gloo/allreduce.cc``, the algorithm that torch asks for) cuts a buffer into a
chunk for each rank; what circulates of a chunk is added up one rank after the other, each addition
rounded to the buffer's dtype. Bit for bit torch's ``all_reduce(SUM)`` on CPU tensors in torch 2.13.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from equivtest.distance import MaybeTensors

LARGEST_SEGMENT = 1 << 20
"""Bytes: ``kMaxSegmentSize`` of ``gloo/allreduce.cc``."""


def ring_average(
    sums: Sequence[MaybeTensors], like: Sequence[Tensor], in_place: Sequence[Sequence[bool]]
) -> list[Tensor | None]:
    """One bucket's average over replicas, as ``DistributedDataParallel`` takes it on gloo.

    Divided first, then added. A gradient that a replica lacks counts as zeros; what all of them
    lack stays without one (``find_unused_parameters``).

    Args:
        sums: by replica, the gradients in the order in which they lie in the bucket.
        like: the parameters, in that order.
        in_place: by replica, which gradients lay in the bucket and were divided by D there; the
            others were multiplied by 1/D on their way into it (``mark_variable_ready_dense`` of
            torch's ``reducer.cpp``).
    """
    D = len(sums)
    flat = [
        torch.cat([_divided(*one, D).reshape(-1) for one in zip(held, like, places, strict=True)])
        for held, places in zip(sums, in_place, strict=True)
    ]
    parts = ring_sum(flat).split([parameter.numel() for parameter in like])
    return [
        None if all(g is None for g in held) else part.view(parameter.shape)
        for part, parameter, *held in zip(parts, like, *sums, strict=True)
    ]


def _divided(gradient: Tensor | None, parameter: Tensor, in_place: bool, D: int) -> Tensor:
    if gradient is None:
        return torch.zeros_like(parameter, requires_grad=False)
    return gradient / D if in_place else gradient * (1.0 / D)


def ring_sum(buffers: Sequence[Tensor]) -> Tensor:
    """What gloo's all-reduce makes of one flat buffer from each rank, in the order of ranks.

    Args:
        buffers: one-dimensional, of one dtype and length.
    """
    if buffers[0].is_complex():  # two floats an element, on their way through gloo
        reals = [torch.view_as_real(buffer).view(-1) for buffer in buffers]
        return torch.view_as_complex(ring_sum(reals).view(-1, 2))
    total = torch.empty_like(buffers[0])
    for chunk, order in chunks(total.numel(), total.element_size(), len(buffers)):
        first, *others = order
        so_far = buffers[first][chunk]
        for rank in others:
            so_far = so_far + buffers[rank][chunk]
        total[chunk] = so_far
    return total


def chunks(elements: int, element_size: int, ranks: int) -> Iterator[tuple[slice, list[int]]]:
    """The chunks of a buffer, each with the order in which the ranks' parts of it are added.

    A chunk is a whole number of segments, of at most 1 MiB each and at least two for each rank.
    Chunk c starts with rank c - 1 and ends with rank c, downwards and modulo the ranks.
    """
    size = elements * element_size
    segments = _round_up(max(-(-size // LARGEST_SEGMENT), 2 * ranks), ranks)
    segment = _round_up(min(-(-size // segments), LARGEST_SEGMENT), element_size)
    length = segment * (segments // ranks) // element_size
    for c in range(ranks):
        begin, end = min(c * length, elements), min((c + 1) * length, elements)
        if begin < end:
            yield slice(begin, end), [(c - 1 - i) % ranks for i in range(ranks)]


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
