"""A lower bound that names no place: every stage on the best devices and links its replica count could have.

For a time T, a dynamic program over the cuts from the end finds the fewest devices with which
candidates of cost <= T reach each cut. Fewer devices after a stage never hurt it (less in flight,
less memory), so the fewest are enough to know. On one server with equal devices nothing is relaxed,
and the bound is the optimum; in general it prunes what :mod:`planner.ilp` is asked.
"""

from __future__ import annotations

import bisect
import math

import networkx as nx

from planner.columns import Candidate, CandidateTable
from planner.problem import Problem, Scenario, prime_powers
from planner.topology import Site, Topology

__all__ = ["Bound", "best_sites", "longer_batches_us"]

_Reached = dict[int, int]  # state -> fewest devices; see Bound._state


class Bound:
    """The position-free relaxation of one scenario."""

    def __init__(self, problem: Problem, scenario: Scenario, sites: list[Site]) -> None:
        self.problem, self.scenario = problem, scenario
        self.table = CandidateTable(problem, scenario)
        self._powers = prime_powers(scenario.multiple) if scenario.exact else ()
        self._one_stage = (1 << len(self._powers)) if problem.stages is not None else 0
        self._wanted = (problem.stages or 0) << len(self._powers) | (1 << len(self._powers)) - 1
        found = (
            self.table.candidate(first, last, site, ())
            for first, last in problem.chain.intervals()
            for site in sites[: min(problem.max_replicas, scenario.max_devices)]
            if scenario.multiple % site.replicas == 0
        )
        self.candidates = sorted(c for c in found if c is not None)
        self._costs = [c.cost_us for c in self.candidates]
        self._starting: dict[int, list[tuple[float, int, int, int, int]]] = {cut: [] for cut in range(problem.chain.end + 1)}
        self._masks = {site.replicas: sum(1 << b for b, power in enumerate(self._powers) if site.replicas % power == 0) for site in sites}
        for c in self.candidates:
            self._starting[c.first].append((c.cost_us, c.last, c.replicas, self._masks[c.replicas], c.max_after))

    def lowest_us(self, ceiling_us: float) -> float | None:
        """The smallest T at which the relaxation has a plan, if it is below ``ceiling_us``."""
        low, high = 0, bisect.bisect_left(self._costs, ceiling_us)  # candidates[:high] are those below
        if high == 0 or self.fewest_devices(self._costs[high - 1]) is None:
            return None
        while low < high - 1:  # a plan with candidates[:high], none with candidates[:low]
            middle = (low + high) // 2
            low, high = (low, middle) if self.fewest_devices(self._costs[middle - 1]) is not None else (middle, high)
        return self._costs[high - 1]

    def fewest_devices(self, time_us: float) -> int | None:
        """Of a relaxed plan within ``time_us``; None when there is none."""
        return self.from_end(time_us)[0].get(self._wanted)

    def from_end(self, time_us: float) -> list[_Reached]:
        """For each cut, the fewest devices that run the layers after it, by state.

        A state is the prime powers of the batch that a replica count covers already (a bit each)
        and, when the number of stages is fixed, how many there are so far (above those bits).
        """
        n, most = self.problem.chain.end, self.scenario.max_devices
        reached: list[_Reached] = [{} for _ in range(n + 1)]
        reached[n] = {0: 0}
        for cut in reversed(range(n)):
            here = reached[cut]
            for cost_us, last, replicas, mask, max_after in self._starting[cut]:
                if cost_us > time_us:
                    break
                for state, after in reached[last].items():
                    devices = after + replicas
                    if after <= max_after and devices <= most:
                        new = (state | mask) + self._one_stage
                        if devices < here.get(new, most + 1):
                            here[new] = devices
        return reached

    def path(self, time_us: float) -> list[tuple[int, int, int]]:
        """Stages (first layer, one past the last, replicas) of a relaxed plan within ``time_us`` on the fewest devices; [] if none."""
        reached = self.from_end(time_us)
        cut, state, n = 0, self._wanted, self.problem.chain.end
        stages: list[tuple[int, int, int]] = []
        while cut < n and state in reached[cut]:
            cut_last, r, state = self._step(reached, cut, state, time_us)
            stages.append((cut, cut_last, r))
            cut = cut_last
        return stages

    def _step(self, reached: list[_Reached], cut: int, state: int, time_us: float) -> tuple[int, int, int]:
        """The cheapest candidate that a state's fewest devices may come from, as (last, replicas, state after it)."""
        for cost_us, last, replicas, mask, max_after in self._starting[cut]:
            for rest, after in reached[last].items():
                if cost_us <= time_us and after <= max_after and (rest | mask) + self._one_stage == state and (
                        after + replicas == reached[cut][state]):
                    return last, replicas, rest
        raise KeyError(state)  # every state was reached by some candidate

    def from_start(self, time_us: float) -> list[int | None]:
        """For each cut, the fewest devices that run the layers before it, memory and batch aside."""
        before: list[int | None] = [None] * (self.problem.chain.end + 1)
        before[0] = 0
        for cut in range(self.problem.chain.end):
            if (start := before[cut]) is None:
                continue
            for cost_us, last, replicas, _, _ in self._starting[cut]:
                if cost_us > time_us:
                    break
                known = before[last]
                before[last] = start + replicas if known is None else min(known, start + replicas)
        return before

    def useful(self, time_us: float) -> list[Candidate]:
        """The candidates of cost <= ``time_us`` that some plan within the device count could contain."""
        before = self.from_start(time_us)
        after = [min(states.values(), default=None) for states in self.from_end(time_us)]
        kept = []
        for c in self.candidates[: bisect.bisect_right(self._costs, time_us)]:
            start, end = before[c.first], after[c.last]
            if start is not None and end is not None and end <= c.max_after and start + c.replicas + end <= self.scenario.max_devices:
                kept.append(c)
        return kept


def longer_batches_us(problem: Problem) -> float | None:
    """What plans could reach if their replica counts' least common multiple were not kept to the number of devices.

    A lower bound, from the largest multiple that counts adding up to the devices can have. None when the batch is given or
    no multiple is longer.
    """
    most = problem.max_devices
    longest = _longest_multiple(most)
    if problem.batch_microbatches is not None or problem.policy == "2bw" or longest <= most:
        return None
    scenario = Scenario(longest, math.lcm(*range(1, most + 1)), False, 1, most)
    return Bound(problem, scenario, best_sites(problem.topology, min(problem.max_replicas, most))).lowest_us(math.inf)


def _longest_multiple(total: int) -> int:
    """The largest least common multiple of positive whole numbers that add up to at most ``total`` (Landau's function).

    >>> [_longest_multiple(total) for total in (1, 4, 5, 8, 16)]
    [1, 4, 6, 15, 140]
    """
    best = [1] * (total + 1)  # best[s]: the largest product of powers of different primes that add up to at most s
    for prime in (p for p in range(2, total + 1) if all(p % q for q in range(2, math.isqrt(p) + 1))):
        for size in range(total, prime - 1, -1):
            power = prime
            while power <= size:
                best[size] = max(best[size], best[size - power] * power)
                power *= prime
    return best[total]


def best_sites(topology: Topology, most: int) -> list[Site]:
    """For each replica count 1, 2, ..., ``most``: attribute by attribute, the best that many devices can have."""
    speeds = sorted((place.device_type.speed for place in topology.places for _ in range(min(place.count, most))), reverse=True)
    unlimited = 10**30
    memories = sorted((place.device_type.memory_bytes or unlimited for place in topology.places for _ in range(min(place.count, most))),
                      reverse=True)
    links = sorted((place.link.bandwidth_bytes_per_s for place in topology.places for _ in range(min(place.count, most))), reverse=True)
    latency_us = min(topology.latency_us(p, p) for p in range(len(topology.places)))
    rings = _ring_bandwidths(topology)
    sites = []
    for r in range(1, most + 1):
        memory = memories[r - 1]
        ring = next(bandwidth for bandwidth, size in rings if size >= r)
        sites.append(Site(r, speeds[r - 1], None if memory == unlimited else memory, links[r - 1], ring, latency_us))
    return sites


def _ring_bandwidths(topology: Topology) -> list[tuple[float, int]]:
    """For each link bandwidth, fastest first, the most devices that links at least as fast join together."""
    rates = {link.bandwidth_bytes_per_s for _, _, link in topology.graph.edges.data("link")}
    result = []
    for rate in sorted(rates, reverse=True):
        joined = nx.Graph()
        joined.add_nodes_from(topology.graph)
        joined.add_edges_from((a, b) for a, b, link in topology.graph.edges.data("link") if link.bandwidth_bytes_per_s >= rate)
        parts = [[node[1] for node in part if isinstance(node, tuple)] for part in nx.connected_components(joined)]
        result.append((rate, max(sum(topology.places[p].count for p in part) for part in parts)))
    return result
