"""What is observed of a GPU, on a stand-in for its allocator and its generator."""

from __future__ import annotations

import pytest
import torch
from ranks import a_rank, weight
from torch import nn
from watching import numbers, observed

from equivtest.loops import accumulate
from equivtest.observe.rng import RandomState
from equivtest.observe.snapshot import keys_on_host


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The peaks that the stand-in gives since each restart: 1 after the first, 2 after the next."""
    restarts: list[int] = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", restarts.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 1000 * len(restarts))
    return restarts


def test_each_microbatch_has_the_peak_of_its_device_up_to_the_next(peaks: list[int]) -> None:
    rank = a_rank(weight(), device=torch.device("cuda", 0))
    trace = observed(accumulate, rank, numbers([[1.0], [2.0]], [[3.0]]))
    found = [[m.peak_bytes for m in update.microbatches] for update in trace.updates]
    assert found == [[1000, 2000], [3000]]
    assert peaks == [torch.device("cuda", 0)] * 3


def test_on_the_cpu_the_peak_is_the_graphs(peaks: list[int]) -> None:
    trace = observed(accumulate, a_rank(weight()), numbers([[1.0]]))
    # The graph of a product by a weight holds its input: one float32 number.
    assert [m.peak_bytes for m in trace.updates[0].microbatches] == [4]
    assert not peaks


def test_numbers_that_a_gpu_drew_are_seen_and_can_be_drawn_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [torch.tensor([1], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: now.__setitem__(0, state))
    before = RandomState.now()
    assert not before.moved()
    now[0] = torch.tensor([2], dtype=torch.uint8)
    assert before.moved()
    before.restore()
    assert not before.moved()


def test_a_process_without_cuda_is_not_asked_for_its_generator() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("needs a process that has not initialised CUDA")
    assert RandomState.now().cuda is None


@pytest.mark.parametrize(
    ("device", "keys"), [("cpu", {"step", "exp_avg", "exp_avg_sq"}), ("meta", {"step"})]
)
def test_adam_counts_on_the_host_wherever_its_moments_are(device: str, keys: set[str]) -> None:
    parameter = nn.Parameter(torch.ones(2, device=device))
    optimizer = torch.optim.Adam([parameter], foreach=False)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert keys_on_host(optimizer) == keys
