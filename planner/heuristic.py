"""Good plans found quickly, so that the exact search starts with a time to beat.

The position-free optimum, its stages fitted into places one by one, often is a real plan already. Two
families follow, each solved by a dynamic program over (cut, devices after it) for one batch::

    packed   stages take consecutive devices in tree order     server0: A A B C   server1: C C D D
    spread   every place runs the same inner pipeline          server0: A A B C   server1: A A B C

It minimises the largest single cost: a stage, its devices' links, or one cut's transfers over one shared
link. What several transfers and rings sum up to on a link is seen only when the whole plan is
evaluated, so these plans are feasible, not optimal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

from planner.bound import Bound
from planner.columns import CandidateTable
from planner.cost import Stage, evaluate
from planner.problem import Problem
from planner.topology import Allocation

__all__ = ["good_plans"]

MOST_STEPS = 3_000_000  # of one dynamic program; larger inputs go without
MOST_FITS = 2_000  # attempts to fit stages into places


def good_plans(bound: Bound, lowest_us: float) -> Iterator[tuple[Stage, ...]]:
    """Plans that fit their devices and have a batch the problem allows, not necessarily the scenario's."""
    problem, capacities = bound.problem, bound.problem.topology.capacities
    fitted = _fitted(bound.path(lowest_us), capacities)
    if fitted and _allowed(problem, fitted):
        yield fitted
        if len(capacities) == 1:  # there it is the optimum itself
            return
    most = bound.scenario.max_devices
    families: list[tuple[int, int, Callable[[int, int], Allocation]]] = [(most, 1, partial(_packed, capacities))]
    for places in sorted({*(1 << bit for bit in range(1, len(capacities).bit_length())), len(capacities)} - {1}):
        if each := min(min(capacities[:places]), most // places):
            families.append((each, places, partial(_spread, len(capacities), places)))
    for most_units, places, allocate in families:
        stages = _best(bound.table, most_units, places, allocate)
        if stages is not None and _allowed(problem, stages):
            yield stages


def _fitted(path: list[tuple[int, int, int, bool]], capacities: Allocation) -> tuple[Stage, ...]:
    """The stages (first, last, replicas, recompute), each whole in one place, the largest first; () if they do not fit that way."""
    order = sorted(range(len(path)), key=lambda k: (-path[k][2], k))
    left, chosen, attempts = list(capacities), [0] * len(path), 0

    def fit(position: int) -> bool:
        nonlocal attempts
        attempts += 1
        if position == len(order):
            return True
        replicas = path[order[position]][2]
        tried = set()
        for place, free in enumerate(left):  # places with as much left are alike
            if free >= replicas and free not in tried and attempts < MOST_FITS:
                tried.add(free)
                left[place] -= replicas
                chosen[order[position]] = place
                if fit(position + 1):
                    return True
                left[place] += replicas
        return False

    if not path or not fit(0):
        return ()
    return tuple(Stage(first, last, tuple(r if p == place else 0 for p in range(len(capacities))), recompute)
                 for (first, last, r, recompute), place in zip(path, chosen, strict=True))


def _best(table: CandidateTable, most: int, unit: int, allocate: Callable[[int, int], Allocation]) -> tuple[Stage, ...] | None:
    """The stages with the smallest largest cost, counting devices in steps of ``unit``."""
    problem, topology, n = table.problem, table.problem.topology, table.problem.chain.end
    intervals, counted = problem.chain.intervals(), problem.stages is not None
    if len(intervals) * most * most * (problem.stages or 1) > MOST_STEPS:
        return None
    counts = [r for r in range(1, most + 1) if table.scenario.admits(r * unit) and r * unit <= problem.max_replicas]
    shapes = [(r, after, allocate(after, r)) for r in counts for after in range(most - r + 1)]
    sited = [(r, after, allocation, topology.site(allocation), recompute)
             for r, after, allocation in shapes for recompute in problem.recompute_choices]
    best: _Table = {(n, 0, 0): (0.0, None, 0)}
    for first, last in sorted(intervals, reverse=True):
        for k in range(problem.stages or 1):  # stages after this one, where their number is fixed
            for r, after, allocation, site, recompute in sited:
                rest = best.get((last, after, k))
                node = (first, after + r, k + counted)
                known_us = best.get(node, (math.inf,))[0]
                if rest is None or known_us <= rest[0]:
                    continue
                cost_us, max_after = table.cost(first, last, site, recompute)
                if after * unit > max_after or max(cost_us, rest[0]) >= known_us:
                    continue
                if rest[1] is not None and topology.shared:
                    cost_us = max(cost_us, _transfer_us(problem, last, allocation, rest[1].allocation))
                if max(cost_us, rest[0]) < known_us:
                    best[node] = (max(cost_us, rest[0]), Stage(first, last, allocation, recompute), after)
    ends = [(best[node][0], node) for devices in range(1, most + 1) if (node := (0, devices, problem.stages or 0)) in best]
    return _walk(best, min(ends)[1]) if ends else None


_Node = tuple[int, int, int]  # cut, devices after it (in units), stages after it (0 unless they are counted)
_Table = dict[_Node, tuple[float, Stage | None, int]]


def _walk(best: _Table, node: _Node) -> tuple[Stage, ...]:
    stages: list[Stage] = []
    while (stage := best[node][1]) is not None:
        stages.append(stage)
        node = (stage.last, best[node][2], max(node[2] - 1, 0))
    return tuple(stages)


def _packed(capacities: Allocation, after: int, r: int) -> Allocation:
    """Devices number ``after`` to ``after + r`` in tree order, counted from the end of the model."""
    allocation, start = [], 0
    for count in capacities:
        allocation.append(max(0, min(after + r, start + count) - max(after, start)))
        start += count
    return tuple(allocation)


def _spread(count: int, places: int, after: int, r: int) -> Allocation:
    """``r`` devices of each of the first ``places`` places, whatever runs after."""
    return (r,) * places + (0,) * (count - places)


def _transfer_us(problem: Problem, cut: int, sender: Allocation, receiver: Allocation) -> float:
    """Of a cut's tensors and their gradients over the busiest shared link."""
    forward, gradient = problem.chain.forward_bytes[cut], problem.chain.gradient_bytes[cut]
    costs = problem.topology.crossing_us_per_byte(sender, receiver)
    return max((max(forward * up + gradient * down, forward * down + gradient * up) for up, down in costs), default=0.0)


def _allowed(problem: Problem, stages: tuple[Stage, ...]) -> bool:
    """By the same rules as every plan: the batch it really has, and the memory it then needs."""
    replicas = [stage.replicas for stage in stages]
    batch = problem.batch(stages)
    too_long = problem.batch_microbatches is None and math.lcm(*replicas) > problem.max_devices
    too_short = problem.policy == "2bw" and batch < sum(replicas)
    uneven = problem.equal_replicas and len(set(replicas)) > 1
    if too_long or too_short or uneven or not problem.keeps_pins(stages):
        return False
    return evaluate(problem.chain, problem.topology, problem.policy, stages, batch).fits
