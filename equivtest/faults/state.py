"""State beside the parameters: the average of the weights."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from equivtest.causes import Cause
from equivtest.experiment import Experiment, Rank
from equivtest.faults.pieces import backward, cleared, reducing_last, right
from equivtest.faults.planting import Planted
from equivtest.faults.setting import Setting, accumulates
from equivtest.loops import advance, several, update
from equivtest.plan import Plan


def average_per_microbatch(rank: Rank) -> None:
    """The average moves at the end of every pass of the inner loop."""
    for group in rank.groups:
        for k, batch in enumerate(group):
            with reducing_last(rank, group, k):
                backward(rank, right(rank, group, batch))
            if k == len(group) - 1:
                if update(rank, several(rank.optimizer)):
                    advance(rank, "applied")
                advance(rank, "attempted")
                cleared(rank)
            rank.average.update_parameters(rank.module)


def exponential_average(model: nn.Module) -> AveragedModel:
    """An exponential average of the weights, decay 0.9."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def with_average(experiment: Experiment, plan: Plan) -> Experiment:
    """With an average of the weights over two updates: torch's takes the first as it is."""
    averages = experiment.averages or exponential_average
    return replace(experiment, averages=averages, updates=max(2, experiment.updates))


def has_average(setting: Setting) -> str:
    if setting.experiment.averages is None:
        return "the experiment has no average of its weights"
    return ""


FAULTS = (
    Planted(
        "state.ema_per_microbatch",
        Cause.EMA_PER_MICROBATCH,
        "F5-TTS #631",
        average_per_microbatch,
        conditions=(accumulates, has_average),
        shaped=with_average,
    ),
)
