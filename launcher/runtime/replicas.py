"""What the replicas of one stage tell one another beside gradients: losses and buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.runtime.channel import Reducer

__all__ = ["averaged_buffers", "sum_over_replicas"]


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
