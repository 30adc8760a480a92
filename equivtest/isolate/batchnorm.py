"""``source.batchnorm``: statistics of a microbatch in place of those of the large batch.

Isolated by a large batch that is normalised microbatch by microbatch, the gradient going through
the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from equivtest.compare.cause import Cause
from equivtest.isolate.chunked import chunked
from equivtest.isolate.isolation import Isolation, Run
from equivtest.isolate.scene import Scene


@dataclass
class BatchStatistics(Isolation):
    """The BatchNorm modules that take statistics of the batch.

    Attributes:
        names: their qualified names, in the model's order.
    """

    names: tuple[str, ...]
    where: str
    cause: Cause = Cause.BATCHNORM

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        modules = [run.module.get_submodule(name) for name in self.names]
        with chunked(modules, [len(ids) for ids in run.chunks]):
            yield


def detect(scene: Scene, found: Sequence[Isolation]) -> list[Isolation]:
    """BatchNorm in the model that is not frozen, where the plan cuts the group at all."""
    normalising = [
        (name, module)
        for name, module in scene.bench.module.named_modules()
        if isinstance(module, _BatchNorm) and takes_statistics(module)
    ]
    if not normalising or len(scene.chunks) < 2:
        return []
    name, first = normalising[0]
    where = f"first at `{name}` ({type(first).__name__})"
    return [BatchStatistics(tuple(name for name, _ in normalising), where)]


def takes_statistics(module: nn.Module) -> bool:
    """It normalises by the batch: in training mode, or without running statistics."""
    running: object = getattr(module, "running_mean", None)
    return module.training or running is None
