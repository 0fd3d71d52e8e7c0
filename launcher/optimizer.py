"""The job's optimizer and learning-rate schedule for one stage, checked.

An optimizer of other parameters would train nothing, silently; so would a schedule of another optimizer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from planner.spec.errors import BadInput

__all__ = ["OptimizerFactory", "SchedulerFactory", "make_optimizer", "make_scheduler"]

OptimizerFactory = Callable[[Any], torch.optim.Optimizer]
SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def make_optimizer(factory: OptimizerFactory, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``factory`` makes for ``parameters``; it may leave some of them out.

    A factory whose argument is called ``named_parameters`` gets (name, parameter) pairs, with the model's own names.

    Raises:
        BadInput: what it made is no optimizer, needs a closure, or holds parameters that it was not given.
    """
    named = next(iter(_arguments(factory)), "") == "named_parameters"
    optimizer = factory(list(parameters.items() if named else parameters.values()))
    if not callable(getattr(optimizer, "step", None)) or not isinstance(getattr(optimizer, "param_groups", None), list):
        raise BadInput(f"the job's optimizer function returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
                       hint="return for example torch.optim.SGD(parameters, lr=0.1)")
    closure = _arguments(optimizer.step).get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise BadInput(f"the job's optimizer is {type(optimizer).__name__}, which runs the model itself several times a step",
                       hint="use an optimizer whose step() needs no closure, such as torch.optim.AdamW")
    given = set(map(id, parameters.values()))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = sum(id(parameter) not in given for parameter in held)
    if others:
        raise BadInput(f"the job's optimizer holds {len(held)} parameters, {others} of them none of the {len(given)} it was given: "
                       "these would never be trained",
                       hint="make it anew from the function's argument: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)")
    return optimizer


def make_scheduler(factory: SchedulerFactory, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """The schedule that ``factory`` makes for ``optimizer``, stepped after each update.

    Raises:
        BadInput: what it made is no such schedule, needs a measured value at each step, or is another optimizer's.
    """
    scheduler = factory(optimizer)
    hint = "return for example torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000), counted in updates"
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise BadInput("the job's scheduler function returned ReduceLROnPlateau, which needs a measured value at every step", hint=hint)
    if not callable(getattr(scheduler, "step", None)) or not callable(getattr(scheduler, "get_last_lr", None)):
        raise BadInput(f"the job's scheduler function returned {type(scheduler).__name__}, not a learning-rate schedule", hint=hint)
    if getattr(scheduler, "optimizer", optimizer) is not optimizer:
        raise BadInput("the job's scheduler is another optimizer's than the one it was given: its learning rates would have no effect",
                       hint="make it anew from the function's argument: scheduler=lambda optimizer: ...LR(optimizer, ...)")
    return scheduler


def _arguments(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Its arguments by name; none where Python cannot tell."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
