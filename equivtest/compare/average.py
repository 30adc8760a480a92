"""The shadow of the weights: one call for each applied update, and nothing else moves it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivtest.causes import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.verdict import About, Finding
from equivtest.distance import distance, norm, ratio
from equivtest.experiment import Experiment
from equivtest.observe.trace import Tensors, UpdateTrace
from equivtest.precision import unit_roundoff

UNITS = 4.0
"""Roundoffs that an average by hand may be off: two products and a sum, in some order."""


def _allowed(wanted: Tensor) -> float:
    return UNITS * unit_roundoff(wanted.dtype) if wanted.is_floating_point() else 0.0


class ExpectedAverage:
    """The experiment's average, moved along with the candidate's parameters.

    Args:
        module: a model of the experiment, into which parameters and buffers are copied.
    """

    def __init__(self, experiment: Experiment, module: nn.Module) -> None:
        self._module = module
        self._average = None if experiment.averages is None else experiment.averages(module)

    @torch.no_grad()
    def judge(self, u: int, update: UpdateTrace) -> Iterator[Finding]:
        """The candidate's average after update ``u``, but for the rounding of one by hand."""
        if self._average is None:
            return
        if update.applied:
            self._move(update.after, update.end.buffers)
        for name, held in self._average.state_dict().items():
            if not isinstance(held, Tensor):
                continue
            found, wanted = update.averages.get(name), held.cpu()
            off = (
                0.0 if same_values(found, wanted) else ratio(distance(found, wanted), norm(wanted))
            )
            if off > _allowed(wanted):
                yield Finding(
                    Cause.STATE,
                    f"the average of weights {name!r} is {off:.3g} of its norm away from what "
                    f"one update_parameters() for each applied update gives after update {u}",
                    update=u,
                    tensor=name,
                    distance=off,
                    tolerance=_allowed(wanted),
                    about=About.AVERAGE,
                )
                break
        if update.averages:  # each update starts from the candidate's own
            self._average.load_state_dict(dict(update.averages))

    @torch.no_grad()
    def moved(
        self, start: Tensors | None, update: UpdateTrace, before: int, after: int
    ) -> dict[str, Tensor]:
        """What so many calls before and after the update make of the average ``start``.

        Args:
            start: None for the average as it was built.
        """
        if self._average is None:
            return {}
        if start is not None:
            self._average.load_state_dict(dict(start))
        for parameters, calls in ((update.before, before), (update.after, after)):
            for _ in range(calls):
                self._move(parameters, update.end.buffers)
        held = self._average.state_dict().items()
        return {k: v.to("cpu", copy=True) for k, v in held if isinstance(v, Tensor)}

    def _move(self, parameters: Tensors, buffers: Tensors) -> None:
        """One call, on a model with these parameters and buffers."""
        assert self._average is not None
        for name, parameter in self._module.named_parameters():
            parameter.copy_(parameters[name])
        for name, buffer in self._module.named_buffers():
            buffer.copy_(buffers[name])
        self._average.update_parameters(self._module)
