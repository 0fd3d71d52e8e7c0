"""Exhaustive search: the oracle that the integer program is held against, for small inputs.

It knows nothing of candidates, scenarios, bounds or relaxations: it walks through every way to cut the
model and every allocation of devices to every stage, and asks the cost model for each complete plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from planner.cost import Stage, evaluate
from planner.hardware.topology import Allocation
from planner.search.problem import Problem

__all__ = ["Best", "exhaustive"]


class Best(NamedTuple):
    """The smallest time, and of the plans that have it, the fewest devices."""

    microbatch_us: float
    devices: int
    stages: tuple[Stage, ...]


def exhaustive(problem: Problem) -> Best | None:
    """The best of all plans; None when there is none. Time grows exponentially: for up to about 6 layers and 6 devices."""
    best: Best | None = None
    for stages in _plans(problem):
        batch = problem.batch(stages)
        if not _allowed(problem, stages, batch):
            continue
        result = evaluate(problem.chain, problem.topology, problem.policy, stages, batch)
        devices = sum(stage.replicas for stage in stages)
        if result.fits and (best is None or _better(result.microbatch_us, devices, best)):
            best = Best(result.microbatch_us, devices, stages)
    return best


def _allowed(problem: Problem, stages: tuple[Stage, ...], batch: int) -> bool:
    devices = sum(stage.replicas for stage in stages)
    if problem.stages is not None and len(stages) != problem.stages:
        return False
    if (problem.equal_replicas and len({stage.replicas for stage in stages}) > 1) or not problem.keeps_pins(stages):
        return False
    if any(batch % stage.replicas or stage.replicas > problem.max_replicas for stage in stages):
        return False
    if problem.batch_microbatches is None and math.lcm(*(stage.replicas for stage in stages)) > problem.max_devices:
        return False
    return devices <= problem.max_devices and not (problem.policy == "2bw" and batch < devices)


def _better(time_us: float, devices: int, best: Best) -> bool:
    if abs(time_us - best.microbatch_us) <= 1e-9 * best.microbatch_us:
        return devices < best.devices
    return time_us < best.microbatch_us


def _plans(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    for path in _paths(problem, 0, problem.max_devices):
        for allocations in _sequences(problem.topology.capacities, len(path)):
            for again in itertools.product(problem.recompute_choices, repeat=len(path)):
                yield tuple(Stage(first, last, allocation, recompute)
                            for (first, last), allocation, recompute in zip(path, allocations, again, strict=True))


def _paths(problem: Problem, start: int, most: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Every way from a cut state to the last, in at most so many stages."""
    if start == problem.chain.end:
        yield ()
    for first, last in problem.chain.intervals():
        if first == start and most > 0:
            for rest in _paths(problem, last, most - 1):
                yield ((first, last), *rest)


def _sequences(capacities: Allocation, count: int) -> Iterator[tuple[Allocation, ...]]:
    """Every way to give ``count`` stages at least one device each."""
    if count == 0:
        yield ()
        return
    for allocation in itertools.product(*(range(capacity + 1) for capacity in capacities)):
        if sum(allocation):
            left = tuple(capacity - taken for capacity, taken in zip(capacities, allocation, strict=True))
            for rest in _sequences(left, count - 1):
                yield (allocation, *rest)
