"""Watch a function for a while: call something before and after it, and change nothing it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def watched(
    owner: Any,
    name: str,
    *,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    over: Callable[[], Any] | None = None,
) -> Iterator[None]:
    """Call ``before`` and ``after`` with the arguments of every call of ``owner.name``.

    ``after`` is not called where it raised; ``over`` is, in any case and last.
    A name that this torch does not have is left unwatched.
    """
    original = owner.__dict__.get(name)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
            if after is not None:
                after(*args, **kwargs)
            return result
        finally:
            if over is not None:
                over()

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)
