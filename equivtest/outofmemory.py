"""A case that does not fit: how it shows, and what to propose."""

from __future__ import annotations

import re

from equivtest.plan import Plan, smaller

LARGE_BATCH = "one batch of"
"""How the reference arms note that they run a whole group at once."""

_WORDS = re.compile(
    r"can'?t allocate memory|cannot allocate memory|not enough memory|out of memory|"
    r"unable to allocate|bad_alloc|ALLOC_FAILED",
    re.IGNORECASE,
)
"""torch's CPU allocator, the operating system, CUDA, numpy, C++ and cuBLAS, in that order."""


def ran_out(kind: str, message: str) -> bool:
    """Whether an exception of type ``kind`` says that memory ran out."""
    return kind.endswith("MemoryError") or bool(_WORDS.search(message))


def did_not_fit(plan: Plan, device: str) -> str:
    """What to try where a microbatch of ``plan`` did not fit; no promise that it then does."""
    other = smaller(plan)
    if other is not None:
        return f"{plan} did not fit; {other} is also {other.examples}"
    text = f"{plan} did not fit, and m is 1 already: no plan of {plan.examples} has a smaller one"
    if device == "cpu" and plan.D > 1:
        alone = Plan(1, plan.A * plan.D, 1, plan.tp, plan.pp)
        text += f"; {alone} is also {plan.examples}, with one replica in this machine's memory"
    return text


def large_batch_did_not_fit(plan: Plan) -> str:
    """The same where it was a whole group that did not fit: no plan cuts that."""
    return (
        f"the large batch of {plan.examples} examples did not fit into one process: it is what the "
        "loop is compared with, the same for every plan of this product; pass a plan of fewer "
        "examples, or a smaller model"
    )
