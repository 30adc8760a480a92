"""What ranks hold alike becomes one object; what differs stays as it was."""

from __future__ import annotations

import torch
from torch import Tensor

from equivtest.compare.alike import alike
from equivtest.observe.trace import State, Trace, UpdateTrace


def a_trace(rank: int, gradient: Tensor | None, parameter: Tensor) -> Trace:
    state = State({"w": parameter}, {"b": torch.ones(1)})
    held = {"w": gradient}
    update = UpdateTrace(
        (), state, held, held, {"w": parameter}, {"w": parameter}, state, {}, (), True
    )
    return Trace(rank, (update,))


def test_equal_bits_become_rank_0s_object() -> None:
    first = a_trace(0, torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    other = a_trace(1, torch.tensor([1.0, 2.0]), torch.tensor([3.0]))
    same, found = alike([first, other])
    assert same is first
    mine, theirs = same.updates[0], found.updates[0]
    assert theirs.gradient["w"] is mine.gradient["w"]
    assert theirs.clipped["w"] is mine.clipped["w"]
    assert theirs.start.parameters["w"] is mine.start.parameters["w"]
    assert theirs.after["w"] is mine.after["w"]
    assert theirs.end.buffers["b"] is not mine.end.buffers["b"]


def test_what_differs_in_a_bit_a_dtype_or_is_missing_is_kept() -> None:
    one = torch.tensor([1.0, 2.0])
    for theirs in (torch.tensor([1.0, 2.0000002]), one.double(), one[None], None):
        _, found = alike([a_trace(0, one, one), a_trace(1, theirs, one)])
        assert found.updates[0].gradient["w"] is theirs
    _, found = alike([a_trace(0, None, one), a_trace(1, one.clone(), one)])
    assert found.updates[0].gradient["w"] is not None
