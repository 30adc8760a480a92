"""Cases that do not fit: what is proposed, and in which arm it was."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from inputs import GOOD, PLAN, an_experiment, check, squared_error
from torch import nn

from equivtest import Loss, Plan, Rank
from equivtest.loops import accumulate

HUGE = 1 << 50  # bytes; no machine has a petabyte


def first_line(verdict: Any) -> str:
    assert verdict.status == "error", verdict.explain()
    return str(verdict.explain().splitlines()[0])


def python_runs_out() -> None:
    raise MemoryError


def cuda_runs_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def the_cpu_allocator_runs_out() -> None:
    torch.empty(HUGE, dtype=torch.uint8)


def numpy_runs_out() -> None:
    import numpy as np

    np.empty(HUGE, dtype=np.uint8)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


RUNS_OUT = [python_runs_out, cuda_runs_out, the_cpu_allocator_runs_out, numpy_runs_out]


def a_loss_that(runs_out: Any, above: int) -> Any:
    """In batches of more than ``above`` examples."""

    def loss(model: nn.Module, batch: Any) -> Loss:
        if len(batch[1]) > above:
            runs_out()
        return squared_error(model, batch)

    return loss


@pytest.mark.parametrize("runs_out", RUNS_OUT)
def test_a_smaller_microbatch_is_proposed(runs_out: Any) -> None:
    text = first_line(check(an_experiment(loss=a_loss_that(runs_out, above=0))))
    assert text.startswith("error: m2-A2-D2 in fp64: all 2 ranks raised ")
    assert "MemoryError" in text or "can't allocate memory" in text
    assert text.endswith(": m2-A2-D2 did not fit; m1-A4-D2 is also 8")


def test_on_one_rank_that_rank_is_named() -> None:
    def loop(rank: Rank) -> None:
        if rank.dp_rank == 1:
            python_runs_out()
        accumulate(rank)

    text = first_line(check(GOOD, loop=loop))
    assert "rank 1 of 2 raised MemoryError: m2-A2-D2 did not fit; m1-A4-D2 is also 8" in text


def test_a_killed_rank_may_have_run_out() -> None:
    def loop(rank: Rank) -> None:
        if rank.dp_rank == 1:
            killed()
        accumulate(rank)

    text = first_line(check(GOOD, loop=loop))
    assert text.endswith(
        "rank 1 of 2 was killed by SIGKILL; if that was for lack of memory: m2-A2-D2 did not fit; "
        "m1-A4-D2 is also 8"
    )


def test_one_example_at_a_time_already() -> None:
    loss = a_loss_that(the_cpu_allocator_runs_out, above=0)
    text = first_line(check(an_experiment(loss=loss), Plan(1, 4, 2)))
    assert "m1-A4-D2 did not fit, and m is 1 already: no plan of 8 has a smaller one" in text
    assert text.endswith("m1-A8-D1 is also 8, with one replica in this machine's memory")


@pytest.mark.parametrize("runs_out", [*RUNS_OUT, killed])
def test_a_large_batch_that_does_not_fit_is_no_fault_of_the_plan(runs_out: Any) -> None:
    verdict = check(an_experiment(loss=a_loss_that(runs_out, above=PLAN.m)))
    text = first_line(verdict)
    assert "in the reference arms: the single process " in text
    assert "the large batch of 8 examples did not fit into one process: it is what " in text
    assert "is also 8" not in text  # a smaller m would not help
    assert text.endswith("pass a plan of fewer examples, or a smaller model")
