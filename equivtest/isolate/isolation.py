"""How one source is made comparable in the two float64 arms of an update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from equivtest.arms.bench import Bench
from equivtest.causes import Cause


@dataclass(frozen=True)
class Run:
    """One forward and backward of an arm.

    Attributes:
        bench: the float64 model and the loss that it runs; what an isolation changes of them it
            puts back.
        ids: the examples, in the order of the batch.
        chunks: the microbatches with examples that the plan cuts ``ids`` into, in order; of a
            microbatch itself, that one.
        update: number of the update.
        seed: the experiment's.
    """

    bench: Bench
    ids: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]
    update: int
    seed: int

    @property
    def module(self) -> nn.Module:
        return self.bench.module


class Isolation:
    """What isolates one source; as it stands here it changes nothing.

    Attributes:
        cause: the source.
        where: where it enters, in words: "first at `features.3` (BatchNorm2d)".
    """

    cause: Cause
    where: str = ""

    @contextmanager
    def whole(self, run: Run) -> Iterator[None]:
        """Around the large batch's forward and backward."""
        yield

    @contextmanager
    def part(self, run: Run) -> Iterator[None]:
        """Around a microbatch's forward and backward."""
        yield

    def part_batch(self, run: Run, whole: Any) -> Any | None:
        """Another batch for a microbatch, made from the large one; None leaves it as it is.

        Args:
            whole: the batch of all the examples of the group.
        """
        return None

    @property
    def parts_too(self) -> bool:
        """The microbatches change as well, not the large batch alone."""
        return False

    def said(self) -> Sequence[str]:
        """What could not be isolated, in sentences; read after both arms have run."""
        return ()


@contextmanager
def entered(isolations: Sequence[Isolation], run: Run, *, whole: bool) -> Iterator[None]:
    """Enter all of them, in order."""
    with ExitStack() as stack:
        for isolation in isolations:
            stack.enter_context(isolation.whole(run) if whole else isolation.part(run))
        yield
