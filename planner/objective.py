"""What is best: the fastest plan, or the one with the fewest devices or the least memory that is fast enough.

Both of the others are found by bisection over the fastest plan within a limit: with more devices, or more
memory, the fastest plan is never slower.
"""

from __future__ import annotations

import math
from dataclasses import replace

from planner.cost import evaluate
from planner.options import Objective
from planner.problem import Problem
from planner.search import Found, search
from planner.spec.cluster import Cluster
from planner.spec.errors import Infeasible
from planner.topology import Topology

__all__ = ["best_for"]

_FINE = 1.001  # memory is found this exactly


def best_for(objective: Objective, problem: Problem, least_us: float, deadline: float | None) -> tuple[Problem, Found] | None:
    """The best plan, and the problem narrowed to the limit that it keeps; None when no plan fits.

    ``least_us`` is the time that the plan must reach.

    Raises:
        Infeasible: the fastest plan is slower than that.
    """
    fastest = search(problem, deadline=deadline)
    if fastest is None:
        return None
    if fastest.microbatch_us > least_us * (1 + 1e-9):
        raise Infeasible(f"--min-samples-per-s asks for at most {least_us:.6g} us per microbatch, the fastest plan takes "
                         f"{fastest.microbatch_us:.6g} us", hint="ask for fewer samples per second, or give a larger cluster")
    if objective == "devices":
        return _fewest_devices(problem, fastest, least_us, deadline)
    if objective == "memory":
        return _least_memory(problem, fastest, least_us, deadline)
    return problem, fastest


def _fewest_devices(problem: Problem, fastest: Found, least_us: float, deadline: float | None) -> tuple[Problem, Found]:
    best = (problem, fastest)
    low, high = (problem.stages or 1) - 1, sum(stage.replicas for stage in fastest.stages)  # too few, and enough
    while high - low > 1:
        middle = (low + high) // 2
        tried = replace(problem, max_devices=middle, max_replicas=min(middle, problem.max_replicas))
        found = _within(tried, least_us, deadline)
        if found is None:
            low = middle
        else:
            best, high = (tried, found), min(middle, sum(stage.replicas for stage in found.stages))
    tried = replace(problem, max_devices=high, max_replicas=min(high, problem.max_replicas))
    found = _within(tried, least_us, deadline)
    return best if found is None else (tried, found)


def _least_memory(problem: Problem, fastest: Found, least_us: float, deadline: float | None) -> tuple[Problem, Found]:
    best = (problem, fastest)
    low, high = 0, _peak_bytes(problem, fastest)
    while high > max(low * _FINE, low + 1):
        middle = (low + high) // 2
        tried = replace(problem, topology=Topology(_limited(problem.topology.cluster, middle)))
        found = _within(tried, least_us, deadline)
        if found is None:
            low = middle
        else:
            best, high = (tried, found), _peak_bytes(tried, found)
    return best


def _within(problem: Problem, least_us: float, deadline: float | None) -> Found | None:
    """The fastest plan, if there is one and it is fast enough; None also when the time is up."""
    try:
        found = search(problem, deadline=deadline)
    except Infeasible:
        return None
    return found if found is not None and found.microbatch_us <= least_us * (1 + 1e-9) else None


def _peak_bytes(problem: Problem, found: Found) -> int:
    result = evaluate(problem.chain, problem.topology, problem.policy, found.stages, found.batch_microbatches)
    return max(memory.total_bytes for memory in result.memory)


def _limited(cluster: Cluster, memory_bytes: int) -> Cluster:
    kinds = tuple(replace(kind, memory_bytes=int(min(memory_bytes, kind.memory_bytes or math.inf))) for kind in cluster.device_types)
    return replace(cluster, device_types=kinds)
