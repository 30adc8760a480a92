"""Frozen dataclasses to plain JSON and back, led by their annotations.

Strict JSON has no NaN and no infinity: a float that is one becomes ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``, and comes back as it was because the field says that it is a float.
"""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class CodecError(ValueError):
    """Data that is not what the annotations say; the message starts with the place."""


@dataclass(frozen=True)
class _Form:
    """An annotation taken apart once: a run has a million floats to read.

    ``shape`` is ``tuple``, ``Mapping``, ``Enum``, ``object`` (a dataclass) or the plain type.
    """

    kind: Any
    shape: Any
    optional: bool
    elements: tuple[Any, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()


def encode(value: Any, kind: Any) -> Any:
    """``value``, annotated ``kind``, as JSON data: only exact builtins, keys in the fields' order.

    Raises:
        CodecError: ``kind`` is not one of the annotations that records use.
    """
    form = _form(kind)
    if value is None:
        return None
    if form.shape is float:
        return _encode_float(float(value))
    if form.shape in (int, bool, str):
        return form.shape(value)
    if form.shape is object:
        return {name: encode(getattr(value, name), hint) for name, hint in form.hints.items()}
    if form.shape is tuple:
        return [encode(v, k) for v, k in zip(value, _kinds(form, len(value)), strict=True)]
    if form.shape is Mapping:
        return {str(key): encode(value[key], form.elements[1]) for key in sorted(value)}
    return str(value.value)


def decode(data: Any, kind: Any, where: str = "record") -> Any:
    """The value of ``kind`` that ``encode`` made ``data`` from.

    Raises:
        CodecError: something is missing, unknown or of another type; says where.
    """
    form = _form(kind)
    if data is None and form.optional:
        return None
    if form.shape is float:
        return _decode_float(data, where)
    if form.shape in (int, bool, str):
        return _expect(data, form.shape, where)
    if form.shape is object:
        return _decode_dataclass(data, form, where)
    if form.shape is tuple:
        return _decode_tuple(data, form, where)
    if form.shape is Mapping:
        values = _expect(data, dict, where).items()
        return {key: decode(value, form.elements[1], f"{where}.{key}") for key, value in values}
    try:
        return form.kind(data)
    except ValueError as error:
        raise CodecError(f"{where}: {error}") from None


def _decode_dataclass(data: Any, form: _Form, where: str) -> Any:
    _expect(data, dict, where)
    unknown = [name for name in data if name not in form.hints]
    if unknown:
        raise CodecError(f"{where} has unknown fields: {', '.join(unknown)}")
    missing = [name for name in form.hints if name in form.required and name not in data]
    if missing:
        raise CodecError(f"{where} lacks {', '.join(missing)}")
    return form.kind(**{n: decode(v, form.hints[n], f"{where}.{n}") for n, v in data.items()})


def _decode_tuple(data: Any, form: _Form, where: str) -> tuple[Any, ...]:
    kinds = _kinds(form, len(_expect(data, list, where)))
    if len(kinds) != len(data):
        raise CodecError(f"{where} has {len(data)} entries, should have {len(kinds)}")
    pairs = enumerate(zip(data, kinds, strict=True))
    return tuple(decode(value, kind, f"{where}[{i}]") for i, (value, kind) in pairs)


@cache
def _form(kind: Any) -> _Form:
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    inner = next(choice for choice in choices if choice is not type(None))
    optional = len(choices) > 1
    if isinstance(inner, type) and is_dataclass(inner):
        hints = get_type_hints(inner)
        required = {f.name for f in fields(inner) if f.default is f.default_factory is MISSING}
        by_name = {f.name: hints[f.name] for f in fields(inner)}
        return _Form(inner, object, optional, (), by_name, frozenset(required))
    if get_origin(inner) in (tuple, Mapping):
        return _Form(inner, get_origin(inner), optional, get_args(inner))
    if inner in (float, int, bool, str):
        return _Form(inner, inner, optional)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return _Form(inner, Enum, optional)
    raise CodecError(f"no JSON form for {kind!r}")


def _kinds(form: _Form, length: int) -> tuple[Any, ...]:
    kinds = form.elements
    return (kinds[0],) * length if len(kinds) == 2 and kinds[1] is Ellipsis else kinds


def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _decode_float(data: Any, where: str) -> float:
    if type(data) is float:
        return data
    if isinstance(data, str) and data in NONFINITE:
        return NONFINITE[data]
    if isinstance(data, bool) or not isinstance(data, int):
        raise CodecError(f"{where}={data!r}, should be a number or one of {', '.join(NONFINITE)}")
    return float(data)


def _expect(data: Any, kind: type, where: str) -> Any:
    """``data`` if it is of ``kind``."""
    # bool is an int to isinstance, and never what an int field holds
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise CodecError(f"{where} is a {type(data).__name__}, should be a {kind.__name__}")
    return data
