"""The steady part of a simulated run: time per microbatch, idle shares, use of links.

The pipeline fills at first and drains at last, so figures are taken from the batches between. How fast
a stage runs can still drift there (a faster early stage runs ahead until its depth is used up), so the
second half of them counts, and the slowest stage. A schedule with fixed times ends up periodic, with a
period of one or more batches; where the last batches show it, the time is that of whole periods and
exact, otherwise it is the mean::

    updates   | fill | settle        | steady         | drain |
"""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.simulation.engine import Done, Record
from planner.spec.schedule import Pipeline

__all__ = ["LinkUse", "enough_batches", "filling_batches", "idle_share", "link_uses", "steady_batches", "steady_operations", "steady_us"]

_SAME = 1e-9  # relative: times nearer than this are equal


class LinkUse(NamedTuple):
    """One direction of a link in the steady part (or in the whole run, when that is too short)."""

    link: str  # path of the node below the link
    way: str  # "up": from the node, "down": to it
    use: float  # share of its capacity
    microbatch_bytes: float  # moved per microbatch of the pipeline


def filling_batches(pipeline: Pipeline) -> int:
    """Batches until every microbatch that may be in flight is."""
    admitted = max(r * depth for r, depth in zip(pipeline.replicas, pipeline.in_flight, strict=True))
    return math.ceil(admitted / pipeline.batch_microbatches)


def enough_batches(pipeline: Pipeline) -> int:
    """Batches to simulate for a steady part that can be trusted: at least 4 fillings, 16 batches and 200 microbatches of it."""
    filling = filling_batches(pipeline)
    return 2 * filling + 2 * max(4 * filling, 16, math.ceil(200 / pipeline.batch_microbatches))


def steady_batches(pipeline: Pipeline) -> range:
    """Batches whose updates are timed; empty when the run is too short to have a steady part.

    >>> steady_batches(Pipeline((1, 1), (2, 1), 1, 100)), len(steady_batches(Pipeline((1, 1), (2, 1), 1, 4)))
    (range(50, 98), 0)
    """
    filling = filling_batches(pipeline)
    first, last = filling, pipeline.batches - filling
    return range(first + (last - first) // 2, last) if last - first >= 4 else range(0)


def steady_us(record: Record, pipeline: Pipeline) -> float | None:
    """Time per microbatch in steady state; None when the run is too short."""
    steady = steady_batches(pipeline)
    if not steady:
        return None
    ends = [_update_ends(stage) for stage in record.workers]
    period = _period(ends, steady)
    batches = len(steady) if period is None else period
    last = steady.stop - 1
    return max(stage[last] - stage[last - batches] for stage in ends) / (batches * pipeline.batch_microbatches)


def _update_ends(replicas: tuple[list[Done], ...]) -> list[float]:
    """When each update was done on every replica of a stage."""
    by_replica = [[done.end_us for done in operations if done.op.kind == "U"] for operations in replicas]
    return [max(ends) for ends in zip(*by_replica, strict=True)]


def _period(ends: list[list[float]], steady: range) -> int | None:
    """The smallest number of batches after which all stages repeat themselves, throughout the second half of ``steady``."""
    last = steady.stop - 1
    seen = range(steady.start + len(steady) // 2, steady.stop)
    tolerance_us = _SAME * max(stage[last] for stage in ends)
    for period in range(1, len(seen) // 2 + 1):
        length_us = ends[0][last] - ends[0][last - period]
        if all(abs(stage[b] - stage[b - period] - length_us) <= tolerance_us for stage in ends for b in seen):
            return period
    return None


def steady_operations(operations: list[Done], pipeline: Pipeline) -> tuple[list[Done], float]:
    """A worker's operations from one steady update to another, and their length in time; without a steady part, all."""
    steady = steady_batches(pipeline)
    if steady:
        updates = [place for place, done in enumerate(operations) if done.op.kind == "U"]
        operations = operations[updates[steady.start - 1] + 1 : updates[steady.stop - 1] + 1]
    if not operations:
        return [], 0.0
    return operations, operations[-1].end_us - (operations[0].ready_us if steady else 0.0)


def idle_share(operations: list[Done], pipeline: Pipeline) -> float:
    """Share of its steady time that a worker waited."""
    counted, length_us = steady_operations(operations, pipeline)
    return math.fsum(done.begin_us - done.ready_us for done in counted) / length_us if length_us > 0 else 0.0


def link_uses(record: Record, pipeline: Pipeline) -> list[LinkUse]:
    """Directions that carried anything. A transfer's bytes are spread evenly over its time on the links."""
    start_us, end_us, microbatches = _window(record, pipeline)
    moved = [0.0] * len(record.directions)
    for transfer in record.transfers:
        shared_us = min(transfer.end_us, end_us) - max(transfer.start_us, start_us)
        length_us = transfer.end_us - transfer.start_us
        if shared_us < 0 or (shared_us == 0 and length_us > 0):
            continue
        bytes_ = transfer.bytes * (shared_us / length_us if length_us > 0 else 1.0)
        for direction in transfer.directions:
            moved[direction] += bytes_
    length_us = end_us - start_us
    return [
        LinkUse(direction.node, direction.way, total / (direction.bytes_per_us * length_us), total / microbatches)
        for direction, total in zip(record.directions, moved, strict=True) if total > 0 and length_us > 0
    ]


def _window(record: Record, pipeline: Pipeline) -> tuple[float, float, float]:
    """Start, end and microbatches of the steady part, from one update of the last stage to another; else of the run."""
    steady = steady_batches(pipeline)
    if not steady:
        return 0.0, max((done[-1].end_us for stage in record.workers for done in stage if done), default=0.0), max(1, pipeline.microbatches)
    ends = _update_ends(record.workers[-1])
    return ends[steady.start - 1], ends[steady.stop - 1], len(steady) * pipeline.batch_microbatches
