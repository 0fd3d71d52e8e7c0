"""What one worker is to do: its place in the pipeline, its part of the model, its data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from launcher.graph.program import StageProgram
from launcher.job import LossScaling
from launcher.optimizer import SchedulerFactory
from launcher.runtime.channel import Worker
from launcher.runtime.source import Source
from planner.spec.plan import Policy
from planner.spec.schedule import Pipeline

__all__ = ["Assignment"]


@dataclass(frozen=True)
class Assignment:
    """What one worker is to do. ``evaluation`` has a program for each size of evaluation microbatch.

    ``averaged_buffers`` are those that training writes to (BatchNorm's running statistics): the
    replicas see different microbatches, so evaluation and the final weights take their mean.
    ``tied`` are the parameters that several stages of the pipeline use, with those stages.
    """

    pipeline: Pipeline
    worker: Worker
    policy: Policy
    program: StageProgram
    train_source: Source
    evaluation: Mapping[int, StageProgram] = field(default_factory=dict)
    evaluation_source: Source | None = None
    evaluation_sizes: tuple[int, ...] = ()  # samples of each evaluation microbatch
    averaged_buffers: tuple[str, ...] = ()
    tied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    scheduler: SchedulerFactory | None = None
    clip_norm: float | None = None  # of the gradients of all stages together
    loss_scaling: LossScaling | None = None
    recompute: bool = False  # keep a microbatch's inputs only, and run its forward again for the backward
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
