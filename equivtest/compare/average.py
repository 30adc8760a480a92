"""The shadow of the weights: one call for each applied update, and nothing else moves it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivtest.causes import Cause
from equivtest.compare.continuity import same_values
from equivtest.compare.verdict import Finding
from equivtest.distance import distance, norm, ratio
from equivtest.experiment import Experiment
from equivtest.observe.trace import UpdateTrace


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
        """The candidate's average after update ``u``, bit for bit."""
        if self._average is None:
            return
        if update.applied:
            for name, parameter in self._module.named_parameters():
                parameter.copy_(update.after[name])
            for name, buffer in self._module.named_buffers():
                buffer.copy_(update.end.buffers[name])
            self._average.update_parameters(self._module)
        for name, held in self._average.state_dict().items():
            if not isinstance(held, Tensor):
                continue
            found, wanted = update.averages.get(name), held.cpu()
            if not same_values(found, wanted):
                off = ratio(distance(found, wanted), norm(wanted))
                yield Finding(
                    Cause.STATE,
                    f"the average of weights {name!r} is {off:.3g} of its norm away from what "
                    f"one update_parameters() for each applied update gives after update {u}",
                    update=u,
                    tensor=name,
                    distance=off,
                    tolerance=0.0,
                )
                self._average.load_state_dict(dict(update.averages))
                return
