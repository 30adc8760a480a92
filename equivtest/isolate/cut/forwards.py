"""Another forward in a module's place, and the module's own put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def instead(
    forwards: Mapping[nn.Module, Callable[..., Any]], *, hooks: bool = True
) -> Iterator[None]:
    """Modules run these forwards while the context lasts.

    Args:
        hooks: with the modules' hooks around them; without, a call goes by unseen.
    """
    name = "forward" if hooks else "_call_impl"  # what __call__ asks the module itself for
    before = {module: vars(module).get(name) for module in forwards}
    try:
        for module, forward in forwards.items():
            vars(module)[name] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own
