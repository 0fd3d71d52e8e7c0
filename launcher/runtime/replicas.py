"""What the replicas of one stage do together: sum gradients, average losses and buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from launcher.runtime.channel import Reducer

__all__ = ["GradientReduction", "averaged_buffers", "sum_over_replicas"]


class GradientReduction:
    """Sums the masters' gradients over a stage's replicas through one flat buffer per dtype.

    The loss's gradient was divided by the batch's microbatches, so the sum over replicas is the
    gradient of the batch's mean loss. Parameters that no microbatch reached keep no gradient: the
    graph is static, so replicas agree on which.
    """

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}

    def __call__(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._reducer.size == 1:
            return
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.grad is not None:
                kinds.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
        for kind, members in kinds.items():
            elements = sum(parameter.numel() for parameter in members)
            flat = self._flat.get(kind)
            if flat is None or flat.numel() != elements:
                flat = self._flat[kind] = torch.empty(elements, dtype=kind[0], device=kind[1])
            views = [part.view(parameter.shape)
                     for part, parameter in zip(flat.split([parameter.numel() for parameter in members]), members, strict=True)]
            torch._foreach_copy_(views, [parameter.grad for parameter in members if parameter.grad is not None])
            self._reducer.sum_(flat)
            for view, parameter in zip(views, members, strict=True):
                parameter.grad = view


def sum_over_replicas(values: Sequence[float], reducer: Reducer, device: torch.device) -> list[float]:
    """Each of ``values`` summed over the stage's replicas."""
    if reducer.size == 1:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    reducer.sum_(tensor)
    return [float(value) for value in tensor]


def averaged_buffers(buffers: Sequence[torch.Tensor], reducer: Reducer) -> list[torch.Tensor]:
    """Copies of the buffers, floating-point ones averaged over the replicas; the originals stay.

    Each replica saw its own microbatches, so BatchNorm's running statistics differ; their mean is
    what evaluation and the final weights use, while training goes on with its own.
    """
    copies = [buffer.detach().clone() for buffer in buffers]
    if reducer.size > 1:
        for copy in copies:
            if copy.is_floating_point() and copy.numel():
                reducer.sum_(copy)
                copy.div_(reducer.size)
    return copies
