"""The job's optimizer for the parameters of one stage, checked: one that holds others would train nothing, silently."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from planner.spec.errors import BadInput

__all__ = ["OptimizerFactory", "make_optimizer"]

OptimizerFactory = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def make_optimizer(factory: OptimizerFactory, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer that ``factory`` makes for ``parameters``; it may leave some of them out.

    Raises:
        BadInput: what it made is no optimizer, or holds parameters that it was not given.
    """
    optimizer = factory(parameters)
    if not callable(getattr(optimizer, "step", None)) or not isinstance(getattr(optimizer, "param_groups", None), list):
        raise BadInput(f"the job's optimizer function returned {type(optimizer).__name__}, not a torch.optim.Optimizer",
                       hint="return for example torch.optim.SGD(parameters, lr=0.1)")
    given = set(map(id, parameters))
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    others = sum(id(parameter) not in given for parameter in held)
    if others:
        raise BadInput(f"the job's optimizer holds {len(held)} parameters, {others} of them none of the {len(given)} it was given: "
                       "these would never be trained",
                       hint="make it anew from the function's argument: optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)")
    return optimizer
