"""What an experiment's factories make for one rank, and whether it is what a rank needs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from equivtest.arguments import a
from equivtest.arms.case import Case
from equivtest.arms.computing import device_of, in_ddp
from equivtest.calling import ExperimentError, calling
from equivtest.experiment import Experiment, wants_device
from equivtest.loops import several


def wrapped(case: Case, module: nn.Module) -> Any:
    """The module in the case's wrapper, ``DistributedDataParallel`` without one.

    Raises:
        ExperimentError: ``wrap`` raised, or gave what a loop cannot call or nothing can train.
    """
    with calling("wrap" if case.wrap else "DistributedDataParallel"):
        model = case.wrap(module) if case.wrap else in_ddp(module, device_of(case))
    if not callable(model):
        raise ExperimentError(f"wrap returned {a(model)}: return the wrapped module")
    if isinstance(model, nn.Module) and not any(True for _ in model.parameters()):
        raise ExperimentError(
            f"wrap returned {a(model)} without parameters: return the module that it is called "
            "with, wrapped"
        )
    accumulates = any(len(replica) > 1 for group in case.groups for replica in group.ids)
    if case.loop is None and accumulates and not hasattr(model, "no_sync"):
        raise ExperimentError(
            f"wrap returned {a(model)} without no_sync(), with which equivtest's recipe reduces "
            "once a group: pass the loop that belongs to this wrap"
        )
    return model


def optimizers_for(experiment: Experiment, module: nn.Module) -> Any:
    """The experiment's optimizer, or mapping of optimizers, over ``module``'s parameters.

    Raises:
        ExperimentError: the factory raised, gave something else, or one that holds other
            parameters than the module's.
    """
    with calling("optimizer"):
        made = experiment.optimizer(module)
    optimizers = several(made)
    odd = [one for one in optimizers if not isinstance(one, Optimizer)]
    if odd or not optimizers:
        given = a(made if made is odd[0] else odd[0]) if odd else "an empty mapping"
        raise ExperimentError(
            f"optimizer returned {given}: return a torch.optim.Optimizer, or a mapping from name "
            "to optimizer"
        )
    own = {id(p) for p in module.parameters()}
    for one in optimizers:
        held = [id(p) for group in one.param_groups for p in group["params"]]
        foreign = sum(key not in own for key in held)
        if foreign:
            raise ExperimentError(
                f"optimizer: {foreign} of the {len(held)} parameters that {type(one).__name__} "
                "holds are not the model's, so no other arm can update them: build it from the "
                "parameters of the model that it is called with, and put those of a loss into it"
            )
    return made


def schedulers_for(experiment: Experiment, optimizers: Any) -> Any:
    """The experiment's scheduler, or mapping of schedulers; None where it has none.

    Raises:
        ExperimentError: the factory raised, or gave something else.
    """
    if experiment.scheduler is None:
        return None
    with calling("scheduler"):
        made = experiment.scheduler(optimizers)
    own = several(optimizers)
    for one in several(made):
        if not hasattr(one, "step"):
            raise ExperimentError(
                f"scheduler returned {a(one)}: return one with .step(), or a mapping of such"
            )
        if isinstance(one, LRScheduler) and not any(one.optimizer is o for o in own):
            raise ExperimentError(
                f"scheduler returned {a(one)} of another optimizer: build it on the optimizer that "
                "it is called with"
            )
    return made


def scaler_for(experiment: Experiment, case: Case) -> Any:
    """The scaler of a precision that needs one.

    Raises:
        ExperimentError: the factory raised, or gave something else.
    """
    if not case.precision.scaled:
        return None
    factory = torch.amp.GradScaler if experiment.scaler is None else experiment.scaler
    with calling("scaler"):
        made = factory(case.device) if wants_device(factory) else factory()
    if not isinstance(made, torch.amp.GradScaler):
        raise ExperimentError(f"scaler returned {a(made)}: return a torch.amp.GradScaler")
    return made


def average_for(experiment: Experiment, module: nn.Module) -> Any:
    """The shadow of the weights; None where the experiment has none.

    Raises:
        ExperimentError: the factory raised, or gave something else.
    """
    if experiment.averages is None:
        return None
    with calling("averages"):
        made = experiment.averages(module)
    if not (hasattr(made, "update_parameters") and hasattr(made, "state_dict")):
        raise ExperimentError(
            f"averages returned {a(made)} without update_parameters() and state_dict(): return a "
            "shadow of the model such as torch.optim.swa_utils.AveragedModel"
        )
    return made
