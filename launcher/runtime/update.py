"""One update of a stage: unscale, clip by the global norm, step the optimizer, then the learning-rate schedule.

The global norm is that of the batch's whole gradient, so with clipping no stage steps before every stage has the
batch's gradient, and a later stage waits for the first; so it is with a loss scale, which an infinity at any stage changes::

    stage 0   B3 .. .. .. B4 |U4
    stage 1   .. B4 F6 .. .. |U4        waits, where it would have gone on without clipping

Nothing else is exact: the gradients of different stages belong to the same microbatches. It never deadlocks
where the schedule does not. An operation before this update would have to wait for one of a neighbour after
it: a backward cannot, as updates divide the backwards alike at every stage; a forward that does so waits
for an update of the stage before, and that one for a backward that its own worker runs after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from launcher.optimizer import OptimizerFactory, SchedulerFactory, make_optimizer, make_scheduler
from launcher.runtime.channel import Reducer
from launcher.runtime.observer import Scaled
from launcher.runtime.scaling import LossScaler

__all__ = ["Update"]

_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


class Update:
    """Steps ``parameters``, by the model's names, by their ``grad``, which it clears.

    ``clip_norm`` bounds the norm of all stages' gradients together, summed over ``everyone``, all workers of
    the pipeline; ``counted`` are the parameters whose gradients this worker adds to it, by default all: each
    gradient counts once, although a stage's replicas and the stages of a tied parameter all have it. With ``scaler`` a
    batch whose gradient is not finite at some stage changes nothing but the scale and the schedule.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], optimizer: OptimizerFactory, scheduler: SchedulerFactory | None = None,
                 clip_norm: float | None = None, everyone: Reducer | None = None, *, counted: Collection[str] | None = None,
                 scaler: LossScaler | None = None) -> None:
        self._parameters = tuple(parameters.values())
        self._counted = tuple(parameter for name, parameter in parameters.items() if counted is None or name in counted)
        self._optimizer = make_optimizer(optimizer, parameters) if parameters else None
        self._scheduler = make_scheduler(scheduler, self._optimizer) if scheduler is not None and self._optimizer is not None else None
        self._clip_norm, self._everyone, self._scaler = clip_norm, everyone, scaler
        self._finite = True
        self.scaled: Scaled | None = None  # of the last update, where losses are scaled

    @property
    def loss_scale(self) -> float:
        """What the losses of the batch of the next update are multiplied with."""
        return 1.0 if self._scaler is None else self._scaler.value

    def agree(self, device: torch.device) -> None:
        """Unscale the gradients, and scale them so that the norm of all stages' gradients is at most ``clip_norm``, if there is one.

        Every worker must call it, whether or not it has parameters.
        """
        if self._clip_norm is None and self._scaler is None:
            return
        sums = torch.zeros(2, dtype=torch.float64, device=device)  # of squares, and of what is not finite
        if self._scaler is not None:
            sums[1] = self._scaler.unscale(_gradients(self._parameters))
        if self._clip_norm is not None:
            counted = _gradients(self._counted)
            for norm in torch._foreach_norm(counted) if counted else ():
                sums[0] += norm.to(torch.float64) ** 2
        if self._everyone is not None:
            self._everyone.sum_(sums)
        if self._scaler is not None:
            self._finite = not bool(sums[1] > 0)
            self.scaled = Scaled(self._scaler.value, not self._finite)
            self._scaler.update(sums[1])
        if self._clip_norm is not None and self._finite:
            factor = torch.clamp(self._clip_norm / (sums[0].sqrt() + _EPSILON), max=1.0)
            for gradient in _gradients(self._parameters):
                gradient.mul_(factor)  # of no dimension: it does not change the gradient's type, nor is it rounded to it

    def step(self) -> None:
        """Change the parameters, unless a gradient was not finite."""
        if self._optimizer is not None and self._finite:
            self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        for parameter in self._parameters:
            parameter.grad = None


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
