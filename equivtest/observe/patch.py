"""Watch a function for a while: call something before and after it, and change nothing it does."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
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


@contextmanager
def outermost(
    places: Iterable[tuple[Any, str]],
    after: Callable[..., Any],
    heed: Callable[..., bool] = lambda *_, **__: True,
) -> Iterator[None]:
    """Call ``after`` when a call of one of the functions has ended that none of them made.

    Args:
        places: owners and names.
        heed: whether a call is one; asked as it begins.
    """
    within: list[bool] = []

    def before(*args: Any, **kwargs: Any) -> None:
        within.append(not within and heed(*args, **kwargs))

    def ended(*args: Any, **kwargs: Any) -> None:
        if within[-1]:
            after(*args, **kwargs)

    with ExitStack() as stack:
        for owner, name in dict.fromkeys(places):
            stack.enter_context(watched(owner, name, before=before, after=ended, over=within.pop))
        yield
