"""Calls of what a user passes: what goes wrong there is told in the argument's name."""

from __future__ import annotations

import contextlib
import functools
import os
import textwrap
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from equivtest.outofmemory import ran_out

NEEDS_GPU = (
    "SyncBatchNorm layers only work with GPU",
    "SyncBatchNorm expected input tensor to be on GPU",
)
"""How torch words that a layer is for GPUs, in DistributedDataParallel and in the layer itself."""

BACKEND_REFUSES = ("NCCL does not support", *NEEDS_GPU)
"""How torch words what a backend cannot do: NCCL reduces no sparse gradient."""

_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_BETWEEN = (contextlib.__file__, functools.__file__)


class ExperimentError(ValueError):
    """An argument does not do what it is called for: a mistake of the experiment, of no loop.

    The first line names the argument, what it was given and what to pass; the user's own traceback
    follows where there is one.
    """


@contextmanager
def calling(argument: str, given: str = "", instead: str = "") -> Iterator[None]:
    """What is raised inside becomes an ``ExperimentError`` that names ``argument``.

    Args:
        given: what the argument was called with, in words.
        instead: what to pass.
    """
    try:
        yield
    except Exception as error:
        told = named(argument, error, given, instead)
        if told is error:
            raise
        raise told from error


@contextmanager
def blaming(argument: str, through: Callable[..., Any]) -> Iterator[None]:
    """The same for what was raised in a call of ``through`` and leaves the block.

    Code in between sees the exception as it was raised, and may catch it.
    """
    try:
        yield
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code is not through.__code__:
            trace = trace.tb_next
        told = error if trace is None else named(argument, error.with_traceback(trace))
        if told is error:
            raise
        raise told from error


def named(argument: str, error: Exception, given: str = "", instead: str = "") -> Exception:
    """``error`` as an ``ExperimentError`` of ``argument``.

    Itself where its kind matters more than where it came from: one that is named already, a lack of
    memory, an operation that torch does not have.
    """
    if isinstance(error, (ExperimentError, NotImplementedError)):
        return error
    kind, message = type(error).__name__, str(error).strip()
    if ran_out(kind, message) or message.startswith(BACKEND_REFUSES):
        return error
    first = message.partition("\n")[0]
    text = f"{argument} raised {kind}{': ' + first if first else ''}"
    text += f" on {given}" if given else ""
    text += f": {instead}" if instead else ""
    return ExperimentError(f"{text}\n{_users_traceback(error)}".rstrip())


def _users_traceback(error: Exception) -> str:
    """Indented, without the frames of this package on top; empty where there are no others."""
    trace = error.__traceback__
    while trace is not None and _is_own(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return ""
    lines = traceback.format_exception(type(error), error, trace)
    return textwrap.indent("".join(lines), "    ")


def _is_own(file: str) -> bool:
    return file.startswith(_OWN) or file in _BETWEEN
