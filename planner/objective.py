"""What is best: the fastest plan, or the one with the fewest devices or the least memory that is fast enough.

Both of the others are found by bisection over the fastest plan within a limit: with more devices, or more
memory, the fastest plan is never slower.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from planner.cost import evaluate
from planner.hardware.topology import Topology
from planner.options import Objective
from planner.search.problem import Problem
from planner.search.search import Found, search
from planner.spec.errors import Infeasible

__all__ = ["Best", "best_for"]

_EQUAL = 1e-9  # relative


class Best(NamedTuple):
    """The best plan found, and the problem narrowed to the limit that it keeps; ``sure``: no smaller limit would do."""

    problem: Problem
    found: Found
    sure: bool


def best_for(objective: Objective, problem: Problem, least_us: float, deadline: float | None) -> Best | None:
    """The best plan; None when no plan fits. ``least_us`` is the time that the plan should reach: where none does, the fastest."""
    fastest = search(problem, deadline=deadline)
    if fastest is None:
        return None
    if not _fast_enough(fastest, least_us):
        return Best(problem, fastest, fastest.bound_us > least_us * (1 + _EQUAL))
    if objective == "throughput":
        return Best(problem, fastest, True)
    return _least(problem, fastest, least_us, deadline, _DEVICES if objective == "devices" else _MEMORY)


class _Measure(NamedTuple):
    """What is to be least: how much a plan needs, the problem with a limit on it, and how exactly it is wanted."""

    of: Callable[[Problem, Found], int]
    limited: Callable[[Problem, int], Problem]
    fine: float


def _least(problem: Problem, fastest: Found, least_us: float, deadline: float | None, measure: _Measure) -> Best:
    best = Best(problem, fastest, True)
    low, high = 0, measure.of(problem, fastest)  # too little, and enough
    while high > max(low * measure.fine, low + 1):
        middle = (low + high) // 2
        tried = measure.limited(problem, middle)
        found, sure = _within(tried, least_us, deadline)
        if found is None:
            low, best = middle, best._replace(sure=best.sure and sure)
        else:
            best, high = Best(tried, found, best.sure), min(middle, measure.of(tried, found))
    tried = measure.limited(problem, high)  # the fastest of those that need no more
    found, _ = _within(tried, least_us, deadline)
    return best if found is None else Best(tried, found, best.sure)


def _within(problem: Problem, least_us: float, deadline: float | None) -> tuple[Found | None, bool]:
    """The fastest plan, if there is one and it is fast enough; and if not, whether that is proven."""
    if problem.stages is not None and problem.stages > problem.max_devices:
        return None, True
    try:
        found = search(problem, deadline=deadline)
    except Infeasible:
        return None, False  # the time was up
    if found is None or _fast_enough(found, least_us):
        return found, True
    return None, found.bound_us > least_us * (1 + _EQUAL)


def _fast_enough(found: Found, least_us: float) -> bool:
    return found.microbatch_us <= least_us * (1 + _EQUAL)


def _device_count(problem: Problem, found: Found) -> int:
    return sum(stage.replicas for stage in found.stages)


def _with_devices(problem: Problem, most: int) -> Problem:
    return replace(problem, max_devices=most, max_replicas=min(most, problem.max_replicas))


def _peak_bytes(problem: Problem, found: Found) -> int:
    result = evaluate(problem.chain, problem.topology, problem.policy, found.stages, found.batch_microbatches)
    return max(memory.total_bytes for memory in result.memory)


def _with_memory(problem: Problem, most_bytes: int) -> Problem:
    cluster = problem.topology.cluster
    kinds = tuple(replace(kind, memory_bytes=int(min(most_bytes, kind.memory_bytes or math.inf))) for kind in cluster.device_types)
    return replace(problem, topology=Topology(replace(cluster, device_types=kinds)))


_DEVICES = _Measure(_device_count, _with_devices, 1.0)
_MEMORY = _Measure(_peak_bytes, _with_memory, 1.001)
