"""Which functions and classes travel by value: those of modules that are not installed.

A rank never imports the user's `__main__`, test modules or conftest: importing them again has side
effects, and under some import modes their names cannot be imported at all.
"""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
import types

_OWN_PACKAGE = __name__.split(".")[0]
_ALWAYS_THERE = {"builtins", _OWN_PACKAGE}


@functools.cache
def travels_by_value(module: str) -> bool:
    """Whether what is defined in `module` is sent as code instead of as a name to import."""
    if module in ("__main__", "__mp_main__"):
        return True
    if module.partition(".")[0] in _ALWAYS_THERE or module in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _is_installed(os.path.realpath(file))


def _is_installed(file: str) -> bool:
    parts = file.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return file.startswith(_installed_roots())


@functools.cache
def _installed_roots() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    roots = {sysconfig.get_path(name) for name in names}
    roots.update(getattr(site, "getsitepackages", list)())
    return tuple(os.path.realpath(root) + os.sep for root in roots if root)


def can_be_imported(module: types.ModuleType) -> bool:
    """Whether another process with the same `sys.path` finds this very module under its name."""
    file = getattr(module, "__file__", None)
    if file is None or not travels_by_value(module.__name__):
        return module.__name__ in sys.modules and module.__name__ != "__main__"
    return _found_at(module.__name__) == os.path.realpath(file)


@functools.cache
def _found_at(name: str) -> str | None:
    # find_spec would answer from sys.modules, which says nothing about another process.
    path: list[str] | None = None
    parent, _, _ = name.rpartition(".")
    if parent:
        path = list(getattr(sys.modules.get(parent), "__path__", []))
    for finder in sys.meta_path:
        if "_pytest" in type(finder).__module__:
            continue
        find = getattr(finder, "find_spec", None)
        spec = find(name, path) if find else None
        if spec is not None and spec.origin:
            return os.path.realpath(spec.origin)
    return None
