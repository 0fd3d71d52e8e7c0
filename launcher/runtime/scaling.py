"""The loss scale: keeps small gradients of 16-bit activations from becoming zero, as ``torch.amp.GradScaler``, with delayed gradients.

Every microbatch of batch b has its loss multiplied by S(b), the scale after b updates, and the update after batch b
divides by the same S(b). The last stage runs the backwards of batch b after its update b - 1, and every other stage
makes update b after its own, so both know S(b) then and none has gone on to S(b + 1), however many batches are in flight::

    last stage   B5 |U5 B6    |U6 B7       B6: seed S(6)   U6: all workers agree on whether batch 6 overflowed, which gives S(7)
    stage 0      .. B4 |U4 F9 B5 |U5       U5: divides by S(5); it comes later, but S(5) was settled at U4

A batch with an infinite gradient at any stage changes no weight at any stage. Its update counts all the same: the version
number advances, the weights in it are those of the version before, so the schedule stays as it was.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from launcher.job import LossScaling

__all__ = ["LossScaler"]


class LossScaler:
    """S(b) of the update to come, by torch's own rules: the same at every worker, which all see the same infinities."""

    def __init__(self, settings: LossScaling, device: torch.device) -> None:
        self._settings = settings
        self._scale = torch.full((), settings.initial, dtype=torch.float32, device=device)
        self._finite = torch.zeros((), dtype=torch.int32, device=device)  # updates since an infinity
        self.value = settings.initial

    def unscale(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Divide the gradients by the scale, in place; above zero if one of them is infinite or not a number."""
        found = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        inverse = self._scale.double().reciprocal().float()
        for dtype in {gradient.dtype for gradient in gradients}:
            torch._amp_foreach_non_finite_check_and_unscale_([one for one in gradients if one.dtype == dtype], found, inverse)
        return found

    def update(self, found: torch.Tensor) -> None:
        """Back off after an infinity anywhere in the pipeline, grow after long enough without."""
        by = self._settings
        torch._amp_update_scale_(self._scale, self._finite, found.to(torch.float32), by.growth, by.backoff, by.growth_interval)
        self.value = float(self._scale)
