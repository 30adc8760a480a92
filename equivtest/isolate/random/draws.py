"""What each random operator of torch makes of uniform numbers, by inverse distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from equivtest.isolate.random.hashing import FLOAT64_BITS

Arguments = Mapping[str, Any]
"""Of an operator, by the names of its schema."""

Uniforms = Callable[[torch.Size, int], Tensor]
"""The size of a field of numbers and their random bits, to float64 in [0, 1)."""


@cache
def may_draw(operator: Any) -> bool:
    """Torch says that it may, or it takes a generator."""
    takes = any("Generator" in str(a.type) for a in operator._schema.arguments)
    return takes or torch.Tag.nondeterministic_seeded in operator.tags


def arguments_of(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
    """All arguments by name, defaults included."""
    schema = operator._schema.arguments
    named = {a.name: a.default_value for a in schema if a.has_default_value()}
    named.update(zip((a.name for a in schema), args, strict=False))
    return {**named, **kwargs}


def is_known(operator: Any) -> bool:
    """Its numbers can be made here."""
    name = _name(operator)
    return name in _VALUES or name in _MASKS


def permutes(operator: Any) -> bool:
    return _name(operator) == "randperm"


def field_of(operator: Any, a: Arguments) -> torch.Size | None:
    """The size of the field of numbers that a call takes; None if they cannot be made here."""
    dtype = a.get("dtype")
    if not is_known(operator) or (isinstance(dtype, torch.dtype) and dtype.is_complex):
        return None
    name = _name(operator)
    if permutes(operator):
        return torch.Size([a["n"]])
    if name == "multinomial" and a["replacement"]:
        return torch.Size([*a["self"].shape[:-1], a["num_samples"]])
    if name == "normal" and "size" not in a:
        held = [v.shape for v in (a.get("mean"), a.get("std")) if isinstance(v, Tensor)]
        return torch.broadcast_shapes(*held) if held else a["self"].shape
    return torch.Size(a["size"]) if "size" in a else _given(a).shape


def draw(operator: Any, a: Arguments, uniforms: Uniforms) -> Any:
    """What a call of a known operator returns, made of ``uniforms``; it writes what it writes."""
    name, size = _name(operator), field_of(operator, a)
    assert size is not None
    if name in _MASKS:
        return _MASKS[name](operator, a, uniforms(size, FLOAT64_BITS))
    in_place = operator._schema.name.endswith("_")
    out: Tensor | None = a["self"] if in_place else a.get("out")
    target = _new(name, a, size) if out is None else out
    values = _VALUES[name](a, uniforms(size, _bits(target.dtype)))
    if not in_place and target.shape != values.shape:
        target.resize_(values.shape)
    return target.copy_(values)


def _name(operator: Any) -> str:
    name: str = operator._schema.name.removeprefix("aten::")
    return name.removesuffix("_").removesuffix("_like")


def _given(a: Arguments) -> Tensor:
    given: Tensor = next(a[key] for key in ("self", "input", "count") if key in a)
    return given


def _new(name: str, a: Arguments, size: torch.Size) -> Tensor:
    """An empty tensor such as the operator gives."""
    dtype, device = a.get("dtype"), a.get("device")
    if "size" in a or name == "randperm":
        default = torch.int64 if name in ("randint", "randperm") else torch.get_default_dtype()
        known = dtype if isinstance(dtype, torch.dtype) else default  # a schema's own is a number
        return torch.empty(size, dtype=known, device=device)
    if name == "multinomial":
        return torch.empty(size, dtype=torch.int64, device=_given(a).device)
    if name == "normal":
        given = next(v for v in (a["mean"], a["std"]) if isinstance(v, Tensor))
        return torch.empty(size, dtype=given.dtype, device=given.device)
    return torch.empty_like(_given(a), dtype=dtype, device=device)


def _bits(dtype: torch.dtype) -> int:
    """As many as the dtype holds without rounding up to 1."""
    if not dtype.is_floating_point:
        return FLOAT64_BITS
    return min(FLOAT64_BITS, 1 - round(math.log2(torch.finfo(dtype).eps)))


def _normal(a: Arguments, u: Tensor) -> Tensor:
    half = 2.0 ** -(FLOAT64_BITS + 1)  # 0 has no quantile
    standard = torch.special.ndtri(u + half)
    if "mean" not in a:
        return standard
    return a["mean"] + a["std"] * standard


def _bernoulli(a: Arguments, u: Tensor) -> Tensor:
    return u < a.get("p", a["self"])


def _integers(a: Arguments, u: Tensor) -> Tensor:
    low, high = a.get("low", a.get("from")) or 0, a.get("high", a.get("to"))
    if high is None:
        dtype = a["self"].dtype
        float_limit = 2 ** _bits(dtype)
        high = float_limit + 1 if dtype.is_floating_point else torch.iinfo(dtype).max
    return low + torch.floor(u * (high - low)).to(torch.int64)


def _poisson(a: Arguments, u: Tensor) -> Tensor:
    """The smallest k with ``P(X <= k) > u``, by halving: ``P(X <= k) = Q(k + 1, rate)``."""
    rate = a["self"].double()
    most = torch.ceil(rate + 40 * torch.sqrt(rate) + 40).clamp(max=2.0**FLOAT64_BITS)
    low, high = -torch.ones_like(rate), most
    while bool(((high - low) > 1).any()):
        middle = torch.floor((low + high) / 2)
        above = torch.special.gammaincc(middle + 1, rate) > u
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high


def _binomial(a: Arguments, u: Tensor) -> Tensor:
    """How many k have ``P(X <= k) <= u``."""
    count, p = torch.broadcast_tensors(a["count"].double(), a["prob"].double())
    found, below = torch.zeros_like(count), torch.zeros_like(count)
    for k in range(int(count.max()) if count.numel() else 0):
        ways = torch.lgamma(count + 1) - math.lgamma(k + 1) - torch.lgamma(count - k + 1)
        chance = torch.exp(ways + torch.special.xlogy(k, p) + torch.special.xlogy(count - k, 1 - p))
        below = below + torch.where(k <= count, chance, 0.0)
        found = found + ((u >= below) & (k < count))
    return found


def _multinomial(a: Arguments, u: Tensor) -> Tensor:
    """Inverse distribution function, or without replacement the first arrivals of a race."""
    p = a["self"].double()
    if a["replacement"]:
        below = torch.cumsum(p / p.sum(-1, keepdim=True), -1)
        return torch.searchsorted(below, u, right=True).clamp(max=p.shape[-1] - 1)
    arrivals = -torch.log1p(-u) / p
    return arrivals.topk(a["num_samples"], largest=False, sorted=True).indices


_VALUES: dict[str, Callable[[Arguments, Tensor], Tensor]] = {
    "uniform": lambda a, u: a["from"] + (a["to"] - a["from"]) * u,
    "rand": lambda _, u: u,
    "randn": _normal,
    "normal": _normal,
    "log_normal": lambda a, u: torch.exp(_normal(a, u)),
    "exponential": lambda a, u: -torch.log1p(-u) / a["lambd"],
    "cauchy": lambda a, u: a["median"] + a["sigma"] * torch.tan(math.pi * (u - 0.5)),
    "geometric": lambda a, u: torch.ceil(torch.log1p(-u) / math.log1p(-a["p"])).clamp(min=1),
    "bernoulli": _bernoulli,
    "randint": _integers,
    "random": _integers,
    "randperm": lambda _, u: torch.argsort(u),
    "poisson": _poisson,
    "binomial": _binomial,
    "multinomial": _multinomial,
}
"""By operator, without the ending of those that write in place or take the size from a tensor."""


def _dropout(_: Any, a: Arguments, u: Tensor) -> tuple[Tensor, Tensor]:
    """torch's p is the chance to drop, and that of ``_fused_dropout`` the chance to keep."""
    given = _given(a)
    if "train" not in a:
        kept, keep = u < a["p"], a["p"]
        return given * kept / keep, kept.to(torch.uint8)
    if a["train"] is False or a["p"] == 0:
        return given.clone(), torch.ones_like(given, dtype=torch.bool)
    kept = u >= a["p"]
    scale = 0.0 if a["p"] == 1 else 1 / (1 - a["p"])
    return given * kept * scale, kept


def _rrelu(operator: Any, a: Arguments, u: Tensor) -> Any:
    given, noise = a["self"], a["noise"]
    if not a["training"]:
        slopes = torch.full_like(given, (a["lower"] + a["upper"]) / 2)
        out = torch.where(given > 0, given, given * slopes)
    else:
        slopes = torch.where(given > 0, 1.0, a["lower"] + (a["upper"] - a["lower"]) * u)
        noise.copy_(slopes)
        out = given * noise
    return given.copy_(out) if operator._schema.name.endswith("_") else out


_MASKS: dict[str, Callable[[Any, Arguments, Tensor], Any]] = {
    "native_dropout": _dropout,
    "_fused_dropout": _dropout,
    "rrelu_with_noise": _rrelu,
}
"""Those that give their numbers, or a mask of them, beside the result."""
