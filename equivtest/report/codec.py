"""Frozen dataclasses to plain JSON and back, led by their annotations.

A tuple of flat dataclasses is a table: the names of its columns once, then a list a row. A run has
hundreds of thousands of rows, and read column by column they cost a quarter.

Strict JSON has no NaN and no infinity: a float that is one becomes ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``, and comes back as it was because the field says that it is a float.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache, partial
from itertools import repeat
from types import NoneType
from typing import Any, Union, get_args, get_origin, get_type_hints

NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


_PLAIN = (float, int, bool, str)

_LARGEST = 2**63 - 1


class CodecError(ValueError):
    """Data that is not what the annotations say; the message starts with the place."""


@dataclass(frozen=True)
class _Form:
    """An annotation taken apart once: a run has a million floats to read.

    ``shape`` is ``tuple``, ``Mapping``, ``Enum``, ``object`` (a dataclass) or the plain type;
    ``row`` is that of a table's rows.
    """

    kind: Any
    shape: Any
    optional: bool
    elements: tuple[Any, ...] = ()
    hints: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    row: _Form | None = None

    @property
    def required(self) -> set[str]:
        return self.hints.keys() - self.defaults.keys()

    @property
    def flat(self) -> bool:
        """A dataclass of plain values and tuples of them."""
        return self.shape is object and all(map(_is_flat, map(_form, self.hints.values())))


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
    if form.row is not None:
        return _encode_table(value, form.row)
    if form.shape is tuple:
        return [encode(v, k) for v, k in zip(value, _kinds(form, len(value)), strict=True)]
    if form.shape is Mapping:
        return {str(key): encode(value[key], form.elements[1]) for key in sorted(value)}
    return str(value.value)


def _encode_table(rows: Sequence[Any], row: _Form) -> dict[str, Any]:
    cells = [[encode(getattr(one, name), kind) for name, kind in row.hints.items()] for one in rows]
    return {"columns": list(row.hints), "rows": cells}


def decode(data: Any, kind: Any, where: str = "record") -> Any:
    """The value of ``kind`` that ``encode`` made ``data`` from.

    Raises:
        CodecError: something is missing, unknown or of another type; says where.
    """
    try:
        return _reader(kind)(data)
    except _MisfitError as misfit:
        raise CodecError(f"{where}{misfit.place}{misfit.text}") from None


class _MisfitError(Exception):
    """``text`` is what is wrong, ``place`` where below the value that is read: ``.rows[3].dtype``.

    The place grows on the way up: written down on the way, it took most of the time of reading.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text
        self.place = ""

    def below(self, place: str) -> _MisfitError:
        self.place = place + self.place
        return self


@dataclass(frozen=True)
class _Reader:
    """How values of an annotation are read: as they are where their exact type is in ``plain``."""

    plain: frozenset[type]
    read: Callable[[Any], Any]

    def __call__(self, data: Any) -> Any:
        return data if type(data) in self.plain else self.read(data)


@cache
def _reader(kind: Any) -> _Reader:
    form = _form(kind)
    plain = {form.shape} if form.shape in (float, bool, str) else set()  # ints have a bound
    return _Reader(frozenset(plain | ({NoneType} if form.optional else set())), _read_of(form))


def _read_of(form: _Form) -> Callable[[Any], Any]:
    if form.shape is float:
        return _decode_float
    if form.shape in (int, bool, str):
        return partial(_expect, kind=form.shape)
    if form.shape is object:
        return partial(_read_dataclass, form, {n: _reader(k) for n, k in form.hints.items()})
    if form.row is not None:
        return partial(_read_table, form, form.row)
    if form.shape is tuple:
        return partial(_read_tuple, form, [_reader(k) for k in form.elements if k is not Ellipsis])
    if form.shape is Mapping:
        return partial(_read_mapping, _reader(form.elements[1]))
    return partial(_read_enum, form.kind)


def _read_dataclass(form: _Form, readers: Mapping[str, _Reader], data: Any) -> Any:
    if not _expect(data, dict).keys() <= readers.keys():
        unknown = [name for name in data if name not in readers]
        raise _MisfitError(f" has unknown fields: {', '.join(unknown)}")
    if not data.keys() >= form.required:
        missing = [name for name in form.hints if name in form.required and name not in data]
        raise _MisfitError(f" lacks {', '.join(missing)}")
    values: dict[str, Any] = {}
    for name, value in data.items():
        reader = readers[name]
        try:
            values[name] = value if type(value) in reader.plain else reader.read(value)
        except _MisfitError as misfit:
            raise misfit.below(f".{name}") from None
    return form.kind(**values)


def _read_tuple(form: _Form, readers: Sequence[_Reader], data: Any) -> tuple[Any, ...]:
    length = len(_expect(data, list))
    each = [readers[0]] * length if _several(form.elements) else readers
    if len(each) != length:
        raise _MisfitError(f" has {length} entries, should have {len(each)}")
    values = []
    for i, (value, reader) in enumerate(zip(data, each, strict=True)):
        try:
            values.append(reader(value))
        except _MisfitError as misfit:
            raise misfit.below(f"[{i}]") from None
    return tuple(values)


def _read_table(form: _Form, row: _Form, data: Any) -> tuple[Any, ...]:
    if isinstance(data, list):  # as schema 1 has them: a mapping a row
        return _read_tuple(form, [_reader(form.elements[0])], data)
    names, rows = _columns_of(data, row)
    columns: dict[str, Iterable[Any]] = {n: repeat(v, len(rows)) for n, v in row.defaults.items()}
    for name, column in zip(names, zip(*rows, strict=True), strict=True) if rows else ():
        columns[name] = _read_column(_reader(row.hints[name]), name, column)
    return tuple(map(row.kind, *(columns[name] for name in row.hints))) if rows else ()


def _columns_of(data: Any, row: _Form) -> tuple[list[str], list[list[Any]]]:
    """Names and rows of a table, whose shapes fit."""
    if _expect(data, dict).keys() != {"columns", "rows"}:
        raise _MisfitError(" is no table: it has other keys than columns and rows")
    names, rows = _expect(data["columns"], list), _expect(data["rows"], list)
    unknown = [str(name) for name in names if not isinstance(name, str) or name not in row.hints]
    if unknown:
        raise _MisfitError(f" has unknown columns: {', '.join(unknown)}")
    missing = [name for name in row.required if name not in names]
    if missing or len(set(names)) < len(names):
        raise _MisfitError(f" lacks columns or has them twice: {', '.join(missing or names)}")
    for i, one in enumerate(rows):
        if len(_expect(one, list)) != len(names):
            raise _MisfitError(f" has {len(one)} entries, should have {len(names)}").below(f"[{i}]")
    return names, rows


def _read_column(reader: _Reader, name: str, column: Sequence[Any]) -> Sequence[Any]:
    if set(map(type, column)) <= reader.plain:
        return column
    values = []
    for i, value in enumerate(column):
        try:
            values.append(reader(value))
        except _MisfitError as misfit:
            raise misfit.below(f"[{i}].{name}") from None
    return values


def _read_mapping(reader: _Reader, data: Any) -> dict[str, Any]:
    values = {}
    for key, value in _expect(data, dict).items():
        try:
            values[key] = reader(value)
        except _MisfitError as misfit:
            raise misfit.below(f".{key}") from None
    return values


def _read_enum(kind: type[Enum], data: Any) -> Enum:
    try:
        return kind(data)
    except ValueError as error:
        raise _MisfitError(f": {error}") from None


@cache
def _form(kind: Any) -> _Form:
    choices = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    inner = next(choice for choice in choices if choice is not type(None))
    optional = len(choices) > 1
    if isinstance(inner, type) and is_dataclass(inner):
        hints = get_type_hints(inner)
        defaults = {f.name: f.default for f in fields(inner) if f.default is not MISSING}
        by_name = {f.name: hints[f.name] for f in fields(inner)}
        return _Form(inner, object, optional, (), by_name, defaults)
    if get_origin(inner) in (tuple, Mapping):
        return _Form(inner, get_origin(inner), optional, get_args(inner), row=_row_of(inner))
    if inner in _PLAIN:
        return _Form(inner, inner, optional)
    if isinstance(inner, type) and issubclass(inner, Enum):
        return _Form(inner, Enum, optional)
    raise CodecError(f"no JSON form for {kind!r}")


def _row_of(kind: Any) -> _Form | None:
    """The form of the rows of ``tuple[Row, ...]`` with a flat ``Row``; None for others."""
    if get_origin(kind) is not tuple or not _several(get_args(kind)):
        return None
    row = _form(get_args(kind)[0])
    return row if row.flat else None


def _is_flat(form: _Form) -> bool:
    inner = _form(form.elements[0]) if form.shape is tuple else form
    return inner.shape in _PLAIN


def _several(elements: tuple[Any, ...]) -> bool:
    return len(elements) == 2 and elements[1] is Ellipsis


def _kinds(form: _Form, length: int) -> tuple[Any, ...]:
    kinds = form.elements
    return (kinds[0],) * length if _several(kinds) else kinds


def _encode_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _decode_float(data: Any) -> float:
    if isinstance(data, str) and data in NONFINITE:
        return NONFINITE[data]
    if isinstance(data, bool) or not isinstance(data, int):
        raise _MisfitError(f"={data!r}, should be a number or one of {', '.join(NONFINITE)}")
    if abs(data) > _LARGEST:
        raise _MisfitError(" is a whole number beyond any that is counted here")
    return float(data)


def _expect(data: Any, kind: type) -> Any:
    """``data`` if it is of ``kind``."""
    # bool is an int to isinstance, and never what an int field holds
    if kind is int and isinstance(data, int) and abs(data) > _LARGEST:
        raise _MisfitError(" is a whole number beyond any that is counted here")
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise _MisfitError(f" is a {type(data).__name__}, should be a {kind.__name__}")
    return data
