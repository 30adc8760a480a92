"""Frozen dataclasses to plain JSON and back, led by their annotations.

Strict JSON has no NaN and no infinity: a float that is one becomes ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``, and comes back as it was because the field says that it is a float.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class CodecError(ValueError):
    """Data that is not what the annotations say; the message starts with the place."""


def encode(value: Any, kind: Any) -> Any:
    """``value``, annotated ``kind``, as JSON data: only exact builtins, keys in the fields' order.

    Raises:
        CodecError: ``kind`` is not one of the annotations that records use.
    """
    kind = _inner(kind)
    if value is None:
        return None
    if isinstance(kind, type) and is_dataclass(kind):
        return {name: encode(getattr(value, name), hint) for name, hint in _hints(kind)}
    if get_origin(kind) is tuple:
        return [encode(v, k) for v, k in zip(value, _element_kinds(kind, len(value)), strict=True)]
    if get_origin(kind) is Mapping:
        _, of = get_args(kind)
        return {str(key): encode(value[key], of) for key in sorted(value)}
    if kind is float:
        return _encode_float(float(value))
    if kind in (int, bool):
        return kind(value)
    if kind is str:
        return str(value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(value.value)
    raise CodecError(f"no JSON form for {kind!r}")


def decode(data: Any, kind: Any, where: str = "record") -> Any:
    """The value of ``kind`` that ``encode`` made ``data`` from.

    Raises:
        CodecError: something is missing, unknown or of another type; says where.
    """
    optional, kind = _is_optional(kind), _inner(kind)
    if data is None and optional:
        return None
    if is_dataclass(kind):
        return _decode_dataclass(data, kind, where)
    if get_origin(kind) is tuple:
        _expect(data, list, where)
        kinds = _element_kinds(kind, len(data))
        if len(kinds) != len(data):
            raise CodecError(f"{where} has {len(data)} entries, should have {len(kinds)}")
        return tuple(
            decode(v, k, f"{where}[{i}]") for i, (v, k) in enumerate(zip(data, kinds, strict=True))
        )
    if get_origin(kind) is Mapping:
        _expect(data, dict, where)
        _, of = get_args(kind)
        return {key: decode(value, of, f"{where}.{key}") for key, value in data.items()}
    if kind is float:
        return _decode_float(data, where)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError as error:
            raise CodecError(f"{where}: {error}") from None
    _expect(data, kind, where)
    return data


def _decode_dataclass(data: Any, kind: Any, where: str) -> Any:
    _expect(data, dict, where)
    hints = dict(_hints(kind))
    unknown = [name for name in data if name not in hints]
    if unknown:
        raise CodecError(f"{where} has unknown fields: {', '.join(unknown)}")
    required = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
    missing = [name for name in hints if name in required and name not in data]
    if missing:
        raise CodecError(f"{where} lacks {', '.join(missing)}")
    return kind(**{n: decode(v, hints[n], f"{where}.{n}") for n, v in data.items()})


@cache
def _hints(kind: Any) -> tuple[tuple[str, Any], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, hints[f.name]) for f in fields(kind))


def _is_optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)


def _inner(kind: Any) -> Any:
    return next(k for k in get_args(kind) if k is not type(None)) if _is_optional(kind) else kind


def _element_kinds(kind: Any, length: int) -> tuple[Any, ...]:
    kinds = get_args(kind)
    return (kinds[0],) * length if len(kinds) == 2 and kinds[1] is Ellipsis else kinds


def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _decode_float(data: Any, where: str) -> float:
    if isinstance(data, str) and data in NONFINITE:
        return NONFINITE[data]
    if isinstance(data, bool) or not isinstance(data, int | float):
        raise CodecError(f"{where}={data!r}, should be a number or one of {', '.join(NONFINITE)}")
    return float(data)


def _expect(data: Any, kind: type, where: str) -> None:
    # bool is an int to isinstance, and never what an int field holds
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise CodecError(f"{where} is a {type(data).__name__}, should be a {kind.__name__}")
