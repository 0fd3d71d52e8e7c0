"""Where a worker's microbatches come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

__all__ = ["Source"]


class Source(Protocol):
    """Tensors at ``positions`` of the microbatches ``indices``, one tuple a microbatch, in that order."""

    def iterate(self, indices: Sequence[int], positions: Sequence[int], /) -> Iterator[tuple[torch.Tensor, ...]]: ...
