"""Good plans found quickly, so that the exact search starts with a time to beat.

Two families are solved each by a dynamic program over (cut, devices after it) for one batch::

    packed   stages take consecutive devices in tree order     server0: A A B C   server1: C C D D
    spread   every place runs the same inner pipeline          server0: A A B C   server1: A A B C

It minimises the largest single cost: a stage, its devices' links, or one cut's transfers over one shared
link. What several transfers and rings sum up to on a link is seen only when the whole plan is
evaluated, so these plans are feasible, not optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from planner.columns import CandidateTable
from planner.cost import Stage, evaluate
from planner.problem import Problem
from planner.topology import Allocation

__all__ = ["good_plans"]

MOST_STEPS = 3_000_000  # of the dynamic program; larger inputs go without


def good_plans(table: CandidateTable) -> Iterator[tuple[Stage, ...]]:
    """Plans that fit their devices and have a batch the problem allows, not necessarily the scenario's."""
    problem, scenario = table.problem, table.scenario
    capacities = problem.topology.capacities
    most = min(scenario.max_devices, sum(capacities))
    families: list[tuple[int, int, Callable[[int, int], Allocation]]] = [(most, 1, lambda after, r: _packed(capacities, after, r))]
    for places in range(2, len(capacities) + 1):
        each = min(min(capacities[:places]), scenario.max_devices // places)
        if each:
            shape = [1] * places + [0] * (len(capacities) - places)
            families.append((each, places, lambda after, r, shape=shape: tuple(r * share for share in shape)))  # type: ignore[misc]
    for most_units, places, allocate in families:
        stages = _best(table, most_units, places, allocate)
        if stages is not None and _allowed(problem, stages):
            yield stages


def _best(table: CandidateTable, most: int, unit: int, allocate: Callable[[int, int], Allocation]) -> tuple[Stage, ...] | None:
    """The stages with the smallest largest cost, counting devices in steps of ``unit``."""
    problem, topology = table.problem, table.problem.topology
    intervals = problem.chain.intervals()
    if problem.stages is not None or len(intervals) * most * most > MOST_STEPS:
        return None
    n = problem.chain.layer_count
    counts = [r for r in range(1, most + 1) if table.scenario.multiple % (r * unit) == 0 and r * unit <= problem.max_replicas]
    shapes = [(r, after, allocate(after, r)) for r in counts for after in range(most - r + 1)]
    sited = [(r, after, allocation, topology.site(allocation)) for r, after, allocation in shapes]
    best: dict[tuple[int, int], tuple[float, Stage | None, int]] = {(n, 0): (0.0, None, 0)}
    for first, last in sorted(intervals, reverse=True):
        for r, after, allocation, site in sited:
            rest = best.get((last, after))
            known_us = best.get((first, after + r), (math.inf,))[0]
            if rest is None or known_us <= rest[0]:
                continue
            cost_us, max_after = table.cost(first, last, site)
            if after * unit > max_after or max(cost_us, rest[0]) >= known_us:
                continue
            if rest[1] is not None and topology.shared:
                cost_us = max(cost_us, _transfer_us(problem, last, allocation, rest[1].allocation))
            if max(cost_us, rest[0]) < known_us:
                best[first, after + r] = (max(cost_us, rest[0]), Stage(first, last, allocation), after)
    ends = [(best[0, devices][0], devices) for devices in range(1, most + 1) if (0, devices) in best]
    return _walk(best, n, min(ends)[1]) if ends else None


def _walk(best: dict[tuple[int, int], tuple[float, Stage | None, int]], n: int, devices: int) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    node = (0, devices)
    while node != (n, 0):
        _, stage, after = best[node]
        if stage is None:
            break
        stages.append(stage)
        node = (stage.last, after)
    return tuple(stages)


def _packed(capacities: Allocation, after: int, r: int) -> Allocation:
    """Devices number ``after`` to ``after + r`` in tree order, counted from the end of the model."""
    allocation, start = [], 0
    for count in capacities:
        allocation.append(max(0, min(after + r, start + count) - max(after, start)))
        start += count
    return tuple(allocation)


def _transfer_us(problem: Problem, cut: int, sender: Allocation, receiver: Allocation) -> float:
    forward, gradient = problem.chain.forward_bytes[cut], problem.chain.gradient_bytes[cut]
    crossings = problem.topology.crossings(sender, receiver)
    return max(
        (max(forward * up + gradient * down, forward * down + gradient * up) / link.link.bandwidth_bytes_per_s * 1e6
         for link, (up, down) in zip(problem.topology.shared, crossings, strict=True)),
        default=0.0,
    )


def _allowed(problem: Problem, stages: tuple[Stage, ...]) -> bool:
    """By the same rules as every plan: the batch it really has, and the memory it then needs."""
    replicas = [stage.replicas for stage in stages]
    batch = problem.batch(stages)
    too_long = problem.batch_microbatches is None and math.lcm(*replicas) > problem.max_devices
    too_short = problem.policy == "2bw" and batch < sum(replicas)
    if too_long or too_short:
        return False
    return evaluate(problem.chain, problem.topology, problem.policy, stages, batch).fits
