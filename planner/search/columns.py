"""Stage candidates: an interval of layers, a place to run it, its cost, and how much may come after it.

Memory depends on the microbatches in flight, 1 + ceil(u / r) when u devices run the stages after a
stage of r replicas, and grows with u. So a memory limit is one number of the candidate,
``max_after``: the largest u with which it fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from planner.cost import stage_cost
from planner.hardware.topology import Allocation, Site, Topology
from planner.memory import depth_within_batch, replica_memory
from planner.search.problem import Problem, Scenario

__all__ = ["Candidate", "CandidateTable", "all_allocations"]

MOST_PLACES = 32  # beyond this no program is worth writing down; planner.search.heuristic finds the plan
MOST_ALLOCATIONS = 700  # beyond this the program takes minutes; see families()


class Candidate(NamedTuple):
    """A stage that may be part of a plan of one scenario."""

    cost_us: float  # the stage and its devices' own links
    first: int
    last: int
    allocation: Allocation  # empty for the position-free ones of planner.search.bound
    replicas: int
    max_after: int
    recompute: bool = False


class CandidateTable:
    """The candidates of one scenario, each worked out once: equal sites cost the same wherever they are."""

    def __init__(self, problem: Problem, scenario: Scenario) -> None:
        self.problem, self.scenario = problem, scenario
        self._flush_speed = problem.topology.fastest if problem.policy == "flush" else None
        self._known: dict[tuple[int, int, Site, bool], tuple[float, int]] = {}

    def cost(self, first: int, last: int, site: Site, recompute: bool = False) -> tuple[float, int]:
        """Cost in microseconds, and the most devices after the stage with which one replica fits (-1: never)."""
        key = (first, last, site, recompute)
        if (known := self._known.get(key)) is None:
            is_last = last == self.problem.chain.end
            copies = self.scenario.copies(self.problem.policy, is_first=first == 0, is_last=is_last)
            cost = stage_cost(self.problem.chain, first, last, site, self.scenario.batch_microbatches, copies=copies,
                              recompute=recompute, flush_speed=self._flush_speed)
            known = self._known[key] = (cost.bottleneck_us, self._max_after(first, last, site, recompute))
        return known

    def candidate(self, first: int, last: int, site: Site, allocation: Allocation, recompute: bool = False) -> Candidate | None:
        """The candidate, or None when it fits its devices under no circumstances."""
        cost_us, max_after = self.cost(first, last, site, recompute)
        return Candidate(cost_us, first, last, allocation, site.replicas, max_after, recompute) if max_after >= 0 else None

    def _max_after(self, first: int, last: int, site: Site, recompute: bool) -> int:
        problem, scenario, r, limit = self.problem, self.scenario, site.replicas, site.memory_bytes
        most = 0 if last == problem.chain.end else scenario.max_devices - r

        def fits(in_flight: int) -> bool:
            in_flight = depth_within_batch(problem.policy, in_flight, r, scenario.batch_microbatches)
            versions = scenario.versions(problem.policy, r, in_flight)
            memory = replica_memory(problem.chain, first, last, in_flight=in_flight, versions=versions, recompute=recompute)
            return limit is None or memory.total_bytes <= limit

        depth = 1 + -(-most // r)
        if limit is not None and not fits(depth):
            low, high = 0, depth  # fits(low), or low is 0; not fits(high)
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
            most = min(most, (low - 1) * r)
        while most >= 0 and first == 0 and not scenario.allows_first(problem.policy, r, most):
            most -= 1
        return max(most, -1)


def all_allocations(topology: Topology, max_replicas: int) -> tuple[list[Allocation], bool]:
    """Allocations to search, and whether that is every one there is.

    With few places all of them; otherwise the :func:`families` that plans are normally made of, and with very many none.
    """
    if len(topology.places) > MOST_PLACES:
        return [], False
    count = 1
    for capacity in topology.capacities:
        count *= capacity + 1
    if len(topology.places) == 1 or count <= (MOST_ALLOCATIONS if topology.interchangeable else MOST_ALLOCATIONS // 4):
        every = itertools.product(*(range(capacity + 1) for capacity in topology.capacities))
        return _sorted(allocation for allocation in every if 0 < sum(allocation) <= max_replicas), True
    return _sorted(allocation for allocation in families(topology) if 0 < sum(allocation) <= max_replicas), False


def families(topology: Topology) -> Iterable[Allocation]:
    """Packed in one place, spread equally over neighbouring places, or whole places and a remainder of the next."""
    places, capacities = len(topology.places), topology.capacities
    empty = (0,) * places
    for start in range(places):
        for each in range(1, capacities[start] + 1):
            yield (*empty[:start], each, *empty[start + 1:])
        for stop in range(start + 2, places + 1):
            for each in range(1, min(capacities[start:stop]) + 1):
                yield (*empty[:start], *[each] * (stop - start), *empty[stop:])
            for rest in range(1, capacities[stop - 1]):
                yield (*empty[:start], *capacities[start:stop - 1], rest, *empty[stop:])


def _sorted(allocations: Iterable[Allocation]) -> list[Allocation]:
    """Fewest devices first, then fewest places, then the first places: the order in which ties are broken."""
    return sorted(set(allocations), key=lambda a: (sum(a), sum(count > 0 for count in a), tuple(-count for count in a)))
