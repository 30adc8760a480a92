"""Functions, classes and modules to bytes: cloudpickle's way, with the same bytes each time.

An experiment is known by a digest of its bytes, which must not depend on what has been done with
its functions and classes before.
"""

from __future__ import annotations

import functools
import sys
import types
import typing
from collections import ChainMap
from collections.abc import Iterable
from typing import Any, ClassVar

import cloudpickle
from cloudpickle import cloudpickle as _cp

from equivtest.pool.byvalue import can_be_imported, travels_by_value


def _reduce_code_object(code: types.CodeType) -> Any:
    """cloudpickle's way, but with the file name: tracebacks from a rank must show the source."""
    make, args = _cp._code_reduce(code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


# What Python adds to a class when it is first copied, pickled, or asked for its annotations.
_ADDED_TO_CLASSES = ("__slotnames__", "__annotations_cache__")


def _reduce_class(cls: type) -> Any:
    """cloudpickle's way, but the same before and after any use of the class."""
    make, args, (names, slots), *rest = _cp._dynamic_class_reduce(cls)
    names = {name: value for name, value in names.items() if name not in _ADDED_TO_CLASSES}
    if names.get("__annotations__") == {}:
        del names["__annotations__"]
    return make, args, (names, slots), *rest


def _reduce_partial(partial: Any) -> Any:
    """functools' way, but the same before and after its attributes were first looked at."""
    make, args, (function, given, named, attributes) = partial.__reduce__()
    return make, args, (function, given, named, attributes or None)


def _find_imported_submodules(code: types.CodeType, dependencies: Iterable[Any]) -> list[Any]:
    """cloudpickle's way, but looking names up instead of going through all modules each time.

    The imported submodules of a function's packages that its code can reach by its names.
    """
    found: list[Any] = []
    packages = [x for x in dependencies if isinstance(x, types.ModuleType) and _package_of(x)]
    waiting = [package.__name__ for package in packages]
    while waiting:
        names = [f"{waiting[0]}.{name}" for name in code.co_names]
        inner = [name for name in names if name in sys.modules]
        found += [sys.modules[name] for name in inner]
        waiting = [*waiting[1:], *inner]
    return found


def _package_of(module: types.ModuleType) -> str | None:
    return getattr(module, "__package__", None)


_function_getstate = types.FunctionType(
    _cp._function_getstate.__code__,
    {**vars(_cp), "_find_imported_submodules": _find_imported_submodules},
)


class CodePickler(cloudpickle.Pickler):
    """Pickles code by value where other processes cannot import it."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _reduce_code_object}, cloudpickle.Pickler.dispatch_table
    )

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.FunctionType:
            if travels_by_value(obj.__module__ or "__main__"):
                args, state = self._function_getnewargs(obj), _function_getstate(obj)
                return _cp._make_function, args, state, None, None, _cp._function_setstate
        elif isinstance(obj, type):
            if travels_by_value(obj.__module__):
                return _reduce_class(obj)
        elif kind is types.ModuleType:
            if not can_be_imported(obj):
                state = {k: v for k, v in vars(obj).items() if not k.startswith("__")}
                return _cp.dynamic_subimport, (obj.__name__, state)
            return NotImplemented
        elif isinstance(obj, types.ModuleType):  # of a class of its own, as torch.backends.mkldnn
            parent, _, name = obj.__name__.rpartition(".")
            if sys.modules.get(obj.__name__) is obj and can_be_imported(obj):
                return _cp.subimport, (obj.__name__,)
            if getattr(sys.modules.get(parent), name, None) is obj:  # as torch.ops.aten
                return getattr, (sys.modules[parent], name)
        elif kind is typing.TypeVar:
            if travels_by_value(obj.__module__):
                return _cp._make_typevar, _cp._decompose_typevar(obj)
            return NotImplemented
        elif kind is functools._lru_cache_wrapper:
            if travels_by_value(obj.__module__):
                return _cached_function, (obj.__wrapped__, obj.cache_parameters())
            return NotImplemented
        elif kind is functools.partial:
            return _reduce_partial(obj)
        elif kind is functools.cached_property:
            return _cached_property, (obj.func, obj.attrname)  # without the lock of Python 3.11
        return super().reducer_override(obj)


def _cached_function(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _cached_property(function: Any, name: str | None) -> Any:
    cached = functools.cached_property(function)
    cached.attrname = name
    return cached
