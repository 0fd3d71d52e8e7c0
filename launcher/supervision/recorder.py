"""What a run measures: spans for the trace, mean times of the steady part, one line of metrics an update.

The pipeline fills in the first updates and drains in the last ones, so means are taken over those
between, counted beforehand from the schedule and not chosen by looking at the times::

    stage 0   F F F B F B F B F B F B B B
    stage 1     F F B F B F B F B F B B          steady: updates [first, last)
    stage 2       F B F B F B F B F B
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from launcher.runtime.channel import Worker
from launcher.runtime.observer import Observer, Scaled
from launcher.supervision.status import StatusBoard
from planner.spec.schedule import Op, Pipeline
from planner.spec.trace import Span

__all__ = ["Measurements", "Recorder", "steady_batches"]

TRACE_SPANS = 100_000  # over all workers: about 12 MB of JSON


def steady_batches(pipeline: Pipeline) -> range:
    """The batches that count as steady: the pipeline is full, and caches and allocators are warm.

    >>> steady_batches(Pipeline((1, 1), (2, 1), 1, 100))
    range(7, 98)
    """
    admitted = max(r * depth for r, depth in zip(pipeline.replicas, pipeline.in_flight, strict=True))
    filling = math.ceil(admitted / pipeline.batch_microbatches)
    warming = min(5, pipeline.batches // 4)
    steady = range(filling + warming, pipeline.batches - filling)
    return steady if len(steady) >= 1 else range(min(1, max(0, pipeline.batches - 1)), pipeline.batches)


@dataclass(frozen=True)
class Measurements:
    """One worker's sums over the steady part, by category, and its pipeline-level time per update."""

    counts: dict[str, int]
    totals_ns: dict[str, int]
    intervals: int  # steady updates timed from the update before to this one, evaluations left out
    intervals_ns: int
    start_ns: int
    end_ns: int
    peak_memory_bytes: int
    spans: tuple[tuple[str, str, int, int], ...]  # name, category, start_ns, end_ns

    def mean_us(self, category: str) -> float:
        count = self.counts.get(category, 0)
        return self.totals_ns.get(category, 0) / count / 1e3 if count else 0.0

    def as_spans(self, worker: Worker, origin_ns: int) -> list[Span]:
        return [Span(worker.stage, worker.replica, name, category, (start - origin_ns) / 1e3, (end - start) / 1e3)
                for name, category, start, end in self.spans]


@dataclass
class Recorder(Observer):
    """Keeps a worker's status slot, spans and sums; the one that knows the loss also writes metrics."""

    pipeline: Pipeline
    worker: Worker
    rank: int
    board: StatusBoard
    microbatch_size: int
    metrics: Path | None  # given to the worker that writes them
    start_ns: int = 0
    _counts: dict[str, int] = field(default_factory=dict)
    _totals_ns: dict[str, int] = field(default_factory=dict)
    _intervals: int = 0
    _intervals_ns: int = 0
    _after_evaluation: bool = False

    def __post_init__(self) -> None:
        steady = steady_batches(self.pipeline)
        self._steady = steady
        self._steady_microbatches = range(steady.start * self.pipeline.batch_microbatches, steady.stop * self.pipeline.batch_microbatches)
        self._spans: deque[tuple[Op, str, int, int]] = deque(maxlen=max(100, TRACE_SPANS // sum(self.pipeline.replicas)))
        self._recent: deque[int] = deque(maxlen=11)
        self._file: IO[str] | None = self.metrics.open("a", encoding="utf-8", buffering=1) if self.metrics is not None else None
        self.start_ns = time.monotonic_ns()
        self._recent.append(self.start_ns)

    def waiting(self, op: Op) -> None:
        self.board.set(self.rank, "waiting", str(op))

    def running(self, op: Op) -> None:
        self.board.set(self.rank, "running", str(op))

    def spent(self, op: Op, category: str, start_ns: int, end_ns: int) -> None:
        if end_ns - start_ns >= 1000:  # a wait that was none is no span
            self._spans.append((op, category, start_ns, end_ns))
        if self._after_evaluation:
            return
        if op.index in (self._steady if op.kind == "U" else self._steady_microbatches) and op.kind != "E":
            self._counts[category] = self._counts.get(category, 0) + 1
            self._totals_ns[category] = self._totals_ns.get(category, 0) + end_ns - start_ns

    def updated(self, batch: int, loss: float | None, scaled: Scaled | None = None) -> None:
        now = time.monotonic_ns()
        if batch in self._steady and batch > 0 and not self.pipeline.evaluates_after(batch - 1):
            self._intervals += 1
            self._intervals_ns += now - self._recent[-1]
        self._recent.append(now)
        self._after_evaluation = self.pipeline.evaluates_after(batch)  # until the next update the stages wait for one another to end it
        if self._file is not None and loss is not None:
            samples = self.pipeline.batch_microbatches * self.microbatch_size
            recent_s = (now - self._recent[0]) / 1e9
            self._write({
                "update": batch + 1, "microbatches": (batch + 1) * self.pipeline.batch_microbatches, "samples": (batch + 1) * samples,
                "train_loss": _finite(loss), "duration_s": round((now - self.start_ns) / 1e9, 6),
                "samples_per_s": round(samples * (len(self._recent) - 1) / recent_s, 3) if recent_s > 0 else 0.0,
                **(scaled._asdict() if scaled is not None else {}),
            })

    def evaluated(self, batch: int, values: Mapping[str, float]) -> None:
        if self._file is not None:
            self._write({"update": batch + 1, "evaluation": {name: _finite(value) for name, value in values.items()}})

    def finish(self, peak_memory_bytes: int) -> Measurements:
        """Everything measured; nothing is recorded any more."""
        if self._file is not None:
            self._file.close()
            self._file = None
        names = {"wait": "wait {}", "allreduce": "allreduce {}", "data": "data {}", "recompute": "recompute {}"}
        spans = tuple((names.get(category, "{}").format(op), category, start, end) for op, category, start, end in self._spans)
        return Measurements(self._counts, self._totals_ns, self._intervals, self._intervals_ns, self.start_ns, time.monotonic_ns(),
                            peak_memory_bytes, spans)

    def _write(self, line: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(json.dumps(line) + "\n")


def _finite(value: float) -> float | None:
    """JSON has no NaN: a loss that left the numbers is null."""
    return value if math.isfinite(value) else None
