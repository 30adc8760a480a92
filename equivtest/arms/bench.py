"""One model on one process, on which the reference arms run: load a state, run a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from equivtest.arms.build import build
from equivtest.batches import by_term
from equivtest.calling import ExperimentError
from equivtest.experiment import Experiment, Loss
from equivtest.observe.memory import GraphMemory
from equivtest.observe.trace import Tensors

Factor = Callable[[int, str | None, torch.dtype], float | None]
"""What to multiply a loss total by before backward, from its order of making, term and dtype."""


@dataclass(frozen=True)
class Pass:
    """One forward and backward.

    Attributes:
        gradients: by position in ``Bench.names``; None where autograd left none.
        attached: some total had a graph to go back through.
        totals, counts, terms: of each ``Loss`` made, in order of making; a loss that is not part of
            the result has no term.
        dtypes: floating dtypes that autograd saved, where they were watched.
    """

    gradients: list[Tensor | None]
    attached: bool
    totals: tuple[float, ...]
    counts: tuple[float, ...]
    terms: tuple[str | None, ...]
    dtypes: frozenset[str]

    def counted(self) -> dict[str, float]:
        """Counts by term."""
        return {t: c for t, c in zip(self.terms, self.counts, strict=True) if t is not None}

    def weighed(self, counts: Mapping[str, float]) -> float:
        """The loss over the group's ``counts``: the sum over terms of total over count."""
        return sum(
            total / counts[term]
            for total, term in zip(self.totals, self.terms, strict=True)
            if term is not None
        )


class Bench:
    """A model in ``dtype``, whose state is loaded before each use.

    Attributes:
        loss: the experiment's.
    """

    def __init__(
        self,
        experiment: Experiment,
        dtype: torch.dtype,
        context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        device: str = "cpu",
        watch_dtypes: bool = False,
    ) -> None:
        self.loss = experiment.loss
        self._context = context
        self._watch_dtypes = watch_dtypes
        self.dtype = dtype
        self.module = build(experiment, dtype, device)
        self._trained = [(n, p) for n, p in self.module.named_parameters() if p.requires_grad]
        self.names = [name for name, _ in self._trained]
        self._parameters = dict(self.module.named_parameters())
        self._modules = list(self.module.named_modules())
        self._attributes = _attributes(self.module)

    @torch.no_grad()
    def load(self, parameters: Tensors, buffers: Tensors | None = None) -> None:
        """Copy a state in, cast to this bench's dtype.

        Raises:
            ExperimentError: the names are not the model's.
        """
        own = self._parameters
        if own.keys() != parameters.keys():
            odd = sorted(own.keys() ^ parameters.keys())
            raise ExperimentError(
                f"the candidate's parameters are not those of model(): {', '.join(odd[:5])}: the "
                "factory must build the same model on each call, and the loop must not replace it"
            )
        torch._foreach_copy_(list(own.values()), [parameters[name] for name in own])
        if buffers:
            self.load_buffers(buffers)

    @torch.no_grad()
    def load_buffers(self, buffers: Tensors) -> None:
        for name, buffer in self.module.named_buffers():
            if name in buffers:
                buffer.copy_(buffers[name])

    def intact(self) -> bool:
        """It has the modules, parameters and attributes that it was built with."""
        held = self.module.named_parameters(), self._parameters.items()
        mine, then = ([(name, id(p)) for name, p in named] for named in held)
        same = mine == then and self._modules == list(self.module.named_modules())
        return same and self._attributes == _attributes(self.module)

    def buffers(self) -> dict[str, Tensor]:
        """Copies on the host."""
        return {n: b.detach().to("cpu", copy=True) for n, b in self.module.named_buffers()}

    def run(self, batch: Any, factor: Factor) -> Pass:
        """Forward ``batch`` and backward each loss total with ``factor``."""
        for _, parameter in self._trained:
            parameter.grad = None
        memory = GraphMemory()
        with memory.watching() if self._watch_dtypes else nullcontext():
            made, terms = self.losses(batch)
        roots, gradients = [], []
        for k, loss in enumerate(made):
            weight = factor(k, terms[k], loss.total.dtype)
            if weight is not None and loss.total.requires_grad:
                roots.append(loss.total)
                gradients.append(torch.full_like(loss.total, weight))
        if roots:
            torch.autograd.backward(roots, gradients)
        return Pass(
            # On the host, as traces are: what is compared and added up must lie in one place.
            gradients=[None if p.grad is None else p.grad.cpu() for _, p in self._trained],
            attached=bool(roots),
            totals=tuple(float(loss.total.detach()) for loss in made),
            counts=tuple(float(loss.count) for loss in made),
            terms=terms,
            dtypes=frozenset(map(str, memory.dtypes)),
        )

    def losses(self, batch: Any) -> tuple[list[Loss], tuple[str | None, ...]]:
        """Each ``Loss`` that a forward makes, with its term."""
        made: list[Loss] = []
        Loss.observer = made.append
        try:
            with self._context():
                result = by_term(self.loss(self.module, batch))
        finally:
            Loss.observer = None
        names = {id(loss): name for name, loss in result.items()}
        return made, tuple(names.get(id(loss)) for loss in made)


def _attributes(module: nn.Module) -> list[tuple[str, object]]:
    """What its modules hold beside parameters, buffers and modules."""
    return [
        (key, _held(value))
        for part in module.modules()
        for key, value in vars(part).items()
        if not (key.startswith("_") and isinstance(value, dict))
    ]


def _held(value: Any) -> object:
    """A plain value, the objects in a collection, or which object it is."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return [*value, *map(id, value.values())]
    return [id(x) for x in value] if isinstance(value, (list, tuple, set)) else id(value)
