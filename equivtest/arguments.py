"""What an argument may be, said with its name, what was given and what to pass instead."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any


def callable_with(argument: str, given: Any, *handed: str) -> None:
    """``given`` can be called with the positional arguments ``handed``.

    Raises:
        TypeError: it is not callable, or takes other arguments.
    """
    if not callable(given):
        raise TypeError(
            f"{argument}={given!r} is {a(given)}: pass a function "
            f"(for a ready object x, lambda *_: x)"
        )
    try:
        # What a decorator takes, not what it says to wrap: it may hand over arguments of its own.
        signature = inspect.signature(given, follow_wrapped=False)
    except (TypeError, ValueError):  # built in: it does not say
        return
    try:
        signature.bind(*handed)
    except TypeError as error:
        name = getattr(given, "__name__", type(given).__name__)
        raise TypeError(
            f"{argument} is {name}{_without_annotations(signature)}, and is called as "
            f"{argument}({', '.join(handed)}): {error}"
        ) from None


def one_of(argument: str, given: object, allowed: Sequence[object]) -> None:
    """``given`` is one of ``allowed``, or a ValueError."""
    if not any(given is one or (isinstance(given, str) and given == one) for one in allowed):
        raise ValueError(f"{argument}={given!r}: pass one of {', '.join(map(repr, allowed))}")


def an_instance(argument: str, given: object, kind: type, instead: str) -> None:
    """``given`` is a ``kind``, or a TypeError that says what to pass ``instead``."""
    if not isinstance(given, kind):
        raise TypeError(f"{argument}={given!r} is {a(given)}: pass {instead}")


def a(given: object) -> str:
    """What was given, by its type: ``a Linear``, ``an int``, ``None``."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    name = type(given).__name__
    return "None" if given is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def is_number(given: object) -> bool:
    """A plain number and not NaN; ``True`` is none."""
    return isinstance(given, (int, float)) and not isinstance(given, bool) and not math.isnan(given)


def is_whole(given: object) -> bool:
    """A plain whole number; ``True`` is none."""
    return isinstance(given, int) and not isinstance(given, bool)


def _without_annotations(signature: inspect.Signature) -> str:
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(inspect.Signature(bare))
