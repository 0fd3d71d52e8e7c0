"""A quick look for any path through a full network, before the integer program is asked for one.

The path with the least total load over all links, by one pass from the end: it often keeps every
single link within its limit too. It misses plans that the program finds, so it never disproves any.
"""

from __future__ import annotations

import math
from collections import defaultdict

from planner.cost import Stage
from planner.search.network import Arc, Node
from planner.search.problem import Problem, Scenario, prime_powers

__all__ = ["least_total_load"]


def least_total_load(problem: Problem, scenario: Scenario, arcs: list[Arc]) -> tuple[Stage, ...]:
    """The stages of that path among those whose replica counts have the scenario's least common multiple; () if there is none."""
    powers = prime_powers(scenario.multiple) if scenario.exact else ()
    everything = (1 << len(powers)) - 1
    cover = {r: sum(1 << bit for bit, power in enumerate(powers) if r % power == 0) for r in range(1, scenario.max_devices + 1)}
    # For each node and the prime powers covered after it: the total load, and the way on.
    best: dict[Node, dict[int, tuple[float, Arc | None, int]]] = defaultdict(dict)
    for arc in sorted(arcs, key=lambda arc: (-arc.tail[0], not arc.tail[1])):  # from the end; at a cut first what begins there
        if arc.head[0] == problem.chain.end:
            best[arc.head] = {0: (0.0, None, 0)}
        mask = cover[arc.candidate.replicas] if arc.candidate is not None else 0
        load = sum(arc.load)
        here = best[arc.tail]
        for covered, (rest, _, _) in list(best[arc.head].items()):
            if load + rest < here.get(covered | mask, (math.inf,))[0]:
                here[covered | mask] = (load + rest, arc, covered)
    starts = [(states[everything][0], node) for node, states in best.items() if node[0] == 0 and everything in states]
    if not starts:
        return ()
    node, covered = min(starts)[1], everything
    stages: list[Stage] = []
    while (step := best[node][covered])[1] is not None:
        arc, covered = step[1], step[2]
        if arc.candidate is not None:
            stages.append(Stage(arc.candidate.first, arc.candidate.last, arc.candidate.allocation, arc.candidate.recompute))
        node = arc.head
    return tuple(stages)
