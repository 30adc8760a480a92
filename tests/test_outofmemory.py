"""What is taken for a lack of memory, and what is proposed then."""

from __future__ import annotations

import pytest

from equivtest import Plan
from equivtest.outofmemory import did_not_fit, ran_out


def test_the_proposal_is_in_figures_and_promises_nothing() -> None:
    text = did_not_fit(Plan(2, 8, 2), "cpu")
    assert text == "m2-A8-D2 did not fit; m1-A16-D2 is also 32"


def test_where_m_is_1_already_more_replicas_do_not_help() -> None:
    known = "m1-A4-D2 did not fit, and m is 1 already: no plan of 8 has a smaller one"
    # Replicas on GPUs of their own share no memory; on the CPU they do.
    assert did_not_fit(Plan(1, 4, 2), "cuda") == known
    assert did_not_fit(Plan(1, 4, 2), "cpu").startswith(f"{known}; m1-A8-D1 is also 8")
    assert did_not_fit(Plan(1, 8, 1), "cpu").endswith("has a smaller one")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("MemoryError", ""),
        ("torch.OutOfMemoryError", "CUDA out of memory."),
        ("numpy._core._exceptions._ArrayMemoryError", "Unable to allocate 8.00 PiB for an array"),
        ("RuntimeError", "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
        ("RuntimeError", "DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        ("RuntimeError", "CUDA error: out of memory"),
        ("RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
        ("RuntimeError", "std::bad_alloc"),
        ("OSError", "[Errno 12] Cannot allocate memory"),
    ],
)
def test_a_lack_of_memory_is_recognised(kind: str, message: str) -> None:
    assert ran_out(kind, message)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x1)"),
        ("ValueError", "memory_format must be contiguous"),
        ("KeyError", "'memory'"),
    ],
)
def test_other_errors_are_not(kind: str, message: str) -> None:
    assert not ran_out(kind, message)
