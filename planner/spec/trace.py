"""Timed intervals of a run or a simulation, and the Chrome trace format they are shown in.

``chrome://tracing`` and https://ui.perfetto.dev open the file: one row a worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Span", "chrome_trace"]


@dataclass(frozen=True)
class Span:
    """What one worker did from ``start_us`` for ``duration_us``: an operation, or waiting for one."""

    stage: int
    replica: int
    name: str  # the operation's text ("2B17"), or "wait 2B17"
    category: str  # forward, recompute, backward, update, allreduce, evaluate, data or wait
    start_us: float
    duration_us: float


def chrome_trace(spans: Iterable[Span]) -> dict[str, Any]:
    """The spans as a Chrome trace: a process row per stage, a thread row per replica."""
    events: list[dict[str, Any]] = []
    rows: set[tuple[int, int]] = set()
    for span in spans:
        rows.add((span.stage, span.replica))
        events.append({"ph": "X", "name": span.name, "cat": span.category, "pid": span.stage, "tid": span.replica,
                       "ts": round(span.start_us, 3), "dur": round(span.duration_us, 3)})
    for stage, replica in sorted(rows):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
        events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": replica, "args": {"name": f"replica {replica}"}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
