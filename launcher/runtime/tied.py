"""A parameter that several stages use (a tied embedding and head): a copy at each, one gradient, the same update everywhere.

Each use sees the version that its own stage's weight policy gives. At the update the gradients of all uses are
summed over all workers of those stages, and every copy takes the same step with the same optimizer state::

    stage 0   B2 .. .. B3 |sum U3     embedding, copy 0        B: gradients of the batch's microbatches
    stage 1   B3 F5 .. .. |    U3     no copy: does not wait
    stage 2   F5 .. .. .. |sum U3     head, copy 2             sum: over every replica of stages 0 and 2

so the copies stay the same bits, and after the run any of them is the parameter. A stage in the sum waits for
the others' last backward of the batch, as all do with clipping (:mod:`launcher.runtime.update`), and it
cannot deadlock for the same reason: these are some of those waits, every worker sums in one order, and before it clips.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from launcher.runtime.channel import Reducer, Transport

__all__ = ["TiedReduction"]


class TiedReduction:
    """Sums the gradients of one worker's tied parameters. False when it has none.

    ``tied`` are the pipeline's tied parameters with the stages that use them, ``masters`` the worker's own parameters.
    """

    def __init__(self, tied: Mapping[str, tuple[int, ...]], masters: Mapping[str, nn.Parameter], stage: int, transport: Transport) -> None:
        self._groups: list[_Group] = []
        for stages in sorted(set(tied.values())):
            reducer = transport.among(stages)  # every worker asks
            if stage in stages:
                self._groups.append(_Group(reducer, [masters[name] for name in sorted(tied) if tied[name] == stages]))

    def __bool__(self) -> bool:
        return bool(self._groups)

    def __call__(self) -> None:
        """Replace each gradient by the sum over all uses; every worker of those stages must call it at the same update."""
        for group in self._groups:
            group.sum()


class _Group:
    """The tied parameters of the same stages."""

    def __init__(self, reducer: Reducer, parameters: list[nn.Parameter]) -> None:
        self._reducer, self._parameters = reducer, parameters
        self._reached: list[bool] | None = None

    def sum(self) -> None:
        if self._reached is None:  # the graphs are static: what gets a gradient once always does
            counts = torch.tensor([float(parameter.grad is not None) for parameter in self._parameters], device=self._parameters[0].device)
            self._reducer.sum_(counts)
            self._reached = [count > 0 for count in counts.tolist()]
        for parameter, reached in zip(self._parameters, self._reached, strict=True):
            if reached and parameter.grad is None:  # only other stages' uses have a gradient
                parameter.grad = torch.zeros_like(parameter)
        for dtype in sorted({parameter.dtype for parameter in self._parameters}, key=str):
            self._sum_of([parameter for parameter in self._parameters if parameter.dtype == dtype and parameter.grad is not None])

    def _sum_of(self, parameters: list[nn.Parameter]) -> None:
        """As one tensor, which the gradients then are views of."""
        if parameters:
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters if parameter.grad is not None])
            self._reducer.sum_(flat)
            for parameter, part in zip(parameters, flat.split([parameter.numel() for parameter in parameters]), strict=True):
                parameter.grad = part.view(parameter.shape)
