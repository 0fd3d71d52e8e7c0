"""What a run measured: ``summary.json`` in the run directory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["Evaluation", "EvaluationSummary", "StageMeasurement", "Summary"]


@dataclass(frozen=True)
class StageMeasurement:
    """Mean times of one stage's replicas over the steady part of the run.

    ``forward_us`` and ``backward_us`` (with what it recomputed) are per microbatch the replica ran, ``update_us`` and
    ``allreduce_us`` per update. ``microbatch_us`` puts them together per microbatch of the whole
    pipeline, as the plan's prediction does. ``idle_share`` is the share of time spent waiting.
    ``peak_memory_bytes`` is the most that training held on one replica; on a CPU without what the
    process held before training began.
    """

    forward_us: float
    backward_us: float
    update_us: float
    allreduce_us: float
    microbatch_us: float
    idle_share: float
    peak_memory_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """Means over the evaluation data with the weights of ``update``: ``loss`` and the job's metrics.

    None stands for a value that is not finite.
    """

    update: int
    values: dict[str, float | None]


@dataclass(frozen=True)
class EvaluationSummary:
    """What ``pipedream eval`` found: ``evaluation.json``. ``values`` are means over the samples, by the weights after ``update``.

    They are empty where the data have no targets; None stands for one that is not finite. ``duration_s`` is from the
    first operation of any worker to the last. ``outputs`` has the shapes of the model's outputs, where they were written.
    """

    FORMAT: ClassVar[str] = "pipedream-evaluation"
    VERSION: ClassVar[int] = 1

    plan_digest: str
    update: int
    microbatches: int
    samples: int
    duration_s: float
    samples_per_s: float
    values: dict[str, float | None]
    outputs: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Summary:
    """A finished run. ``microbatch_us`` is measured over the steady part: warm-up and drain left out."""

    FORMAT: ClassVar[str] = "pipedream-summary"
    VERSION: ClassVar[int] = 1

    plan_digest: str
    seed: int
    updates: int
    microbatches: int
    samples: int
    duration_s: float
    microbatch_us: float
    samples_per_s: float
    final_train_loss: float | None  # mean over the last tenth of the updates; None when a loss was not finite
    evaluations: tuple[Evaluation, ...]
    stages: tuple[StageMeasurement, ...]
