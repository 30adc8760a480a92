"""Collectives that Python calls: by the loop, or by a communication hook of its own.

They are watched where all of torch's own functions end, at the methods of ``ProcessGroup``: a loop
that imported ``all_reduce`` by name is seen as well. Not seen are calls from C++: what the reducer
of ``DistributedDataParallel`` does, and functional collectives (``torch.distributed.
_functional_collectives``), which a compiler reads too. A sharding wrapper's own are left out.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from equivtest.observe.handed import memory_of
from equivtest.observe.hooks import in_transform
from equivtest.observe.snapshot import ModelState

WATCHED: Mapping[str, tuple[str, int]] = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "allgather": ("all_gather", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor", 1),
    "all_gather_single_coalesced": ("all_gather_into_tensor", 1),
    "reduce_scatter": ("reduce_scatter", 1),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor", 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter_tensor", 1),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 1),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
}
"""By method of ``ProcessGroup``: what users call it, and which argument holds what is sent."""

OF_A_WRAPPER = (
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.tensor",
    "torch.nn.parallel",
)
"""Packages whose collectives are a wrapper's own."""

PLUMBING = (
    "equivtest.observe",
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
)
"""What lies between a call of torch's functions and the process group."""

PROPORTIONAL = 1e-4
"""How far the squared cosine of a buffer with the gradients may be from 1: bfloat16 rounds by less.
"""

FEW = 16
"""Elements below which two vectors may be proportional by chance: they must be equal then, or 1/D.
"""


@dataclass(frozen=True)
class Call:
    """One call, as it begins."""

    name: str
    op: str
    dtype: str
    elements: int
    parameters: frozenset[str]

    @property
    def detail(self) -> str:
        """For an event: ``all_reduce sum float32, 13 elements, by hand``."""
        what = " ".join(part for part in (self.name, self.op, self.dtype) if part)
        return f"{what}, {self.elements:,} element{'' if self.elements == 1 else 's'}, by hand"

    @property
    def adds_gradients(self) -> bool:
        """It makes a sum or an average of gradients."""
        return bool(self.parameters) and self.op in ("sum", "avg")


def call_of(method: str, args: Sequence[Any], model: ModelState, D: int) -> Call | None:
    """What a call of a ``ProcessGroup``'s method does; None where it is a wrapper's own.

    Args:
        method: a name in ``WATCHED``.
        args: its arguments, the process group not among them.
    """
    if _of_a_wrapper():
        return None
    name, place = WATCHED[method]
    sent = [leaf for leaf in tree_leaves(args[place : place + 1]) if isinstance(leaf, Tensor)]
    elements = sum(tensor.numel() for tensor in sent)
    return Call(
        name=name,
        op=next((op for op in map(_operation, args) if op), ""),
        dtype=str(sent[0].dtype).removeprefix("torch.") if sent else "",
        elements=elements,
        parameters=_lying_in(sent, model) or _copied_to(sent, model, D),
    )


def _operation(argument: Any) -> str:
    """Name of the reduction that an argument asks for, in its options or itself."""
    held = getattr(argument, "reduceOp", argument)
    op = getattr(held, "op", None)
    return "" if op is None else str(op).rsplit(".", 1)[-1].lower()


def _of_a_wrapper() -> bool:
    """Who called torch's function is a wrapper, not who called that one."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(PLUMBING):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__", "").startswith(OF_A_WRAPPER))


def _lying_in(sent: Sequence[Tensor], model: ModelState) -> frozenset[str]:
    """Parameters whose gradients lie in memory that was sent."""
    if len(sent) == 1:
        itself = next((name for name, held in model.held_gradients() if held is sent[0]), None)
        if itself is not None:
            return frozenset({itself})
    spans = [memory_of(tensor) for tensor in sent if _plain(tensor) and tensor.numel()]
    return frozenset(
        name
        for name, gradient in model.held_gradients()
        if _plain(gradient)
        and any(start <= gradient.data_ptr() < end for start, end in spans if gradient.numel())
    )


def _copied_to(sent: Sequence[Tensor], model: ModelState, D: int) -> frozenset[str]:
    """Parameters whose gradients, one after the other, are what a buffer holds.

    In another dtype or times a number, perhaps.
    """
    if len(sent) != 1 or not _plain(sent[0]):
        return frozenset()
    buffer, held = sent[0].detach().flatten(), list(model.held_gradients())
    if buffer.numel() < 2 or not buffer.is_floating_point():
        return frozenset()
    for run in _runs([gradient.numel() for _, gradient in held], buffer.numel()):
        own = held[run]
        if all(_plain(gradient) for _, gradient in own) and _proportional(
            buffer, [gradient for _, gradient in own], D
        ):
            return frozenset(name for name, _ in own)
    return frozenset()


def _runs(sizes: Sequence[int], whole: int) -> list[slice]:
    """Runs of neighbours whose sizes add up to ``whole``."""
    starts, total, places = {0: 0}, 0, []
    for k, size in enumerate(sizes):
        total += size
        if total - whole in starts:
            places.append(slice(starts[total - whole], k + 1))
        starts.setdefault(total, k + 1)
    return places


def _proportional(buffer: Tensor, gradients: Sequence[Tensor], D: int) -> bool:
    products = torch.zeros(3, dtype=torch.float64)
    at = 0
    for gradient in gradients:
        ours = gradient.detach().flatten()
        theirs = buffer[at : at + ours.numel()].to(ours.dtype)
        at += ours.numel()
        for k, (a, b) in enumerate(((ours, ours), (theirs, theirs), (ours, theirs))):
            products[k] += torch.dot(a, b).double().cpu()
    own, other, both = products.tolist()
    if not own * other > 0 or not math.isfinite(both) or both <= 0:
        return False
    ratio = both / own
    if buffer.numel() < FEW and not any(math.isclose(ratio, r, rel_tol=1e-2) for r in (1, 1 / D)):
        return False
    return both**2 >= (1 - PROPORTIONAL) * own * other


def _plain(tensor: Tensor) -> bool:
    """It has memory of its own."""
    return tensor.layout is torch.strided and not in_transform(tensor)
