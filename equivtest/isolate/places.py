"""Where in a forward something happens, in one form of words for every source."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Place:
    """The innermost module whose forward runs, or the loss outside of the model.

    Attributes:
        name: its qualified name; empty for the model itself.
        kind: its class; empty for the loss.
    """

    name: str
    kind: str

    @property
    def module(self) -> str:
        """The module in words."""
        return f"`{self.name}` ({self.kind})" if self.name else f"the model ({self.kind})"

    def __str__(self) -> str:
        if not self.kind:
            return "in the loss"
        return f"at {self.module}" if self.name else f"in the model's own forward ({self.kind})"


IN_THE_LOSS = Place("", "")


def places(model: nn.Module) -> Iterator[tuple[nn.Module, Place]]:
    """Every module of the model with its place, but scripted ones.

    Those take no hooks, and call nothing that Python sees.
    """
    for name, module in model.named_modules():
        if not isinstance(module, torch.jit.ScriptModule):
            yield module, Place(name, type(module).__name__)


@contextmanager
def running(model: nn.Module) -> Iterator[Callable[[], Place]]:
    """What says, while the context lasts, where the model's forward is."""
    within: list[Place] = []

    def leave(*_: Any) -> None:
        within.pop()

    with ExitStack() as hooks:
        for module, place in places(model):

            def enter(_: nn.Module, __: Any, place: Place = place) -> None:
                within.append(place)

            hooks.callback(module.register_forward_pre_hook(enter).remove)
            hooks.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield lambda: within[-1] if within else IN_THE_LOSS
