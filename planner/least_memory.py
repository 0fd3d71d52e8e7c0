"""The least memory per device with which there is a plan, to the byte, and such a plan.

Devices are taken to be equal in memory; then any of them will do, and places play no part: what a stage holds
depends on the devices after it, so the position-free relaxation (:mod:`planner.search.bound`) at any time decides
whether there is a plan. The least memory is found by bisection, scenario by scenario.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from planner.hardware.topology import Topology
from planner.memory import depth_within_batch, live_versions, replica_memory
from planner.search.bound import Bound, best_sites
from planner.search.problem import Problem, Scenario, scenarios
from planner.spec.schedule import default_in_flight
from planner.variants import with_memory

__all__ = ["LeastMemory", "least_memory", "may_exist", "stage_needs"]


class LeastMemory(NamedTuple):
    """``stages`` are (first, last, replicas)."""

    memory_bytes: int
    batch_microbatches: int
    stages: tuple[tuple[int, int, int], ...]


def may_exist(problem: Problem) -> bool:
    """Whether some plan fits if every stage had the best devices; exact where all have as much memory and no layer is pinned."""
    sites = best_sites(problem.topology, min(problem.max_replicas, problem.max_devices))
    return any(Bound(problem, scenario, sites).fewest_devices(math.inf) is not None for scenario in scenarios(problem))


def least_memory(problem: Problem) -> LeastMemory | None:
    """The least need over all scenarios; None when no plan has the other limits."""
    limited = replace(problem, topology=Topology(with_memory(problem.topology.cluster, 1)))
    best: LeastMemory | None = None
    for scenario in scenarios(problem):
        too_little = 0
        found = _within(limited, scenario, None if best is None else best.memory_bytes - 1)
        while found is not None:
            best, found = found, None
            while best.memory_bytes - too_little > 1 and found is None:
                middle = (too_little + best.memory_bytes) // 2
                found = _within(limited, scenario, middle)
                too_little = too_little if found is not None else middle
    return best


def _within(problem: Problem, scenario: Scenario, memory_bytes: int | None) -> LeastMemory | None:
    """A plan on devices of so much memory; its own need is what it really takes."""
    sites = best_sites(problem.topology, min(problem.max_replicas, problem.max_devices))
    bound = Bound(problem, scenario, [site._replace(memory_bytes=memory_bytes) for site in sites])
    if bound.fewest_devices(math.inf) is None:
        return None
    stages = tuple((first, last, r) for first, last, r, _ in bound.path(math.inf))
    return LeastMemory(max(stage_needs(problem, stages, scenario.batch_microbatches)), scenario.batch_microbatches, stages)


def stage_needs(problem: Problem, stages: tuple[tuple[int, int, int], ...], batch_microbatches: int) -> list[int]:
    """Bytes that a replica of each stage needs at least: with recomputation where that may be and helps."""
    replicas = tuple(r for _, _, r in stages)
    in_flight = tuple(depth_within_batch(problem.policy, depth, r, batch_microbatches)
                      for depth, r in zip(default_in_flight(replicas), replicas, strict=True))
    return [
        min(replica_memory(problem.chain, first, last, in_flight=in_flight[k], recompute=recompute,
                           versions=live_versions(problem.policy, replicas, in_flight, batch_microbatches, k)).total_bytes
            for recompute in problem.recompute_choices)
        for k, (first, last, _) in enumerate(stages)
    ]
