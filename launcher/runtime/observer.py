"""What a worker tells about itself while it runs. The base class ignores everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from planner.spec.schedule import Op

__all__ = ["Observer", "Scaled", "awaited"]


class Scaled(NamedTuple):
    """What a batch's losses were multiplied with, and whether its update was skipped for an infinite gradient."""

    loss_scale: float
    skipped: bool


class Observer:
    """Called by the worker's loop; times are ``time.monotonic_ns()``."""

    def waiting(self, op: Op) -> None:
        """The worker starts to wait for another worker, which ``op`` needs."""

    def running(self, op: Op) -> None:
        """The worker has what ``op`` needs and starts it."""

    def spent(self, op: Op, category: str, start_ns: int, end_ns: int) -> None:
        """A part of ``op`` is over: forward, recompute, backward, update, allreduce, evaluate, data or wait."""

    def updated(self, batch: int, loss: float | None, scaled: Scaled | None = None) -> None:
        """The update after ``batch`` is done; ``loss`` is the batch's mean, known at the last stage; ``scaled`` where losses are."""

    def evaluated(self, batch: int, values: Mapping[str, float]) -> None:
        """Means over the evaluation data with the weights after ``batch``; at the last stage only."""


def awaited(observer: Observer, op: Op, receive: Callable[[int], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """What ``op`` receives from another worker, with the wait for it told to ``observer``."""
    start = time.monotonic_ns()
    observer.waiting(op)
    tensors = receive(op.index)
    observer.running(op)
    observer.spent(op, "wait", start, time.monotonic_ns())
    return tensors
