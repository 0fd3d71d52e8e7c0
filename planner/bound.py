"""A lower bound that names no place: every stage on the best devices and links its replica count could have.

For a time T, a dynamic program over the cuts from the end finds the fewest devices with which
candidates of cost <= T reach each cut. Fewer devices after a stage never hurt it (less in flight,
less memory), so the fewest are enough to know. On one server with equal devices nothing is relaxed,
and the bound is the optimum; in general it prunes what :mod:`planner.ilp` is asked.
"""

from __future__ import annotations

import math

import networkx as nx
import numpy as np
import numpy.typing as npt

from planner.columns import Candidate, CandidateTable
from planner.problem import Problem, Scenario, prime_powers
from planner.stage_arrays import stage_arrays
from planner.topology import Site, Topology

__all__ = ["Bound", "best_sites", "longer_batches_us"]

Ints = npt.NDArray[np.int64]
NEVER = 1 << 50  # weight of what cannot be reached
MOST_TIES = 3000  # candidates of equally good plans, of which more say nothing new


class Bound:
    """The position-free relaxation of one scenario.

    Candidates stand in arrays, by ``first`` and then by cost. A *state* is the prime powers of the batch that a
    replica count covers already (a bit each) and, when the number of stages is fixed, how many there are so
    far (above those bits). What is least is a *weight*: devices first, and then stages.
    """

    def __init__(self, problem: Problem, scenario: Scenario, sites: list[Site]) -> None:
        self.problem, self.scenario = problem, scenario
        self.table = CandidateTable(problem, scenario)
        powers = prime_powers(scenario.multiple) if scenario.exact else ()
        one_stage = (1 << len(powers)) if problem.stages is not None else 0
        self._wanted = (problem.stages or 0) << len(powers) | (1 << len(powers)) - 1
        fitting = [site for site in sites[: min(problem.max_replicas, scenario.max_devices)] if scenario.multiple % site.replicas == 0]
        self._collect(fitting, [sum(1 << b for b, power in enumerate(powers) if site.replicas % power == 0) for site in fitting])
        states = np.arange(self._wanted + 1)
        after = (states[None, :] | np.arange(1 << len(powers))[:, None]) + one_stage
        self._next = np.where(after <= self._wanted, after, self._wanted + 1)  # by mask and state; the last is nowhere
        self._known: tuple[float, Ints] | None = None
        self._device = problem.chain.end + 2  # weight of a device; a stage weighs one

    def _collect(self, sites: list[Site], masks: list[int]) -> None:
        stages = stage_arrays(self.problem.chain)
        costs = [stages.cost_us(self.problem, self.scenario, site) for site in sites]
        limits = [stages.max_after(self.problem, self.scenario, site) for site in sites]
        count, replicas = len(stages.first), np.array([site.replicas for site in sites], dtype=np.int64)
        first, last = np.tile(stages.first, len(sites)), np.tile(stages.last, len(sites))
        cost, limit, r = np.concatenate(costs), np.concatenate(limits), np.repeat(replicas, count)
        order = np.lexsort((r, last, cost, first))
        order = order[limit[order] >= 0]
        self.first, self.last, self.cost_us, self.max_after, self.replicas = first[order], last[order], cost[order], limit[order], r[order]
        self.mask = np.array(masks, dtype=np.int64).repeat(count)[order]
        self._weight = self.replicas * (self.problem.chain.end + 2) + 1
        self._begins = np.searchsorted(self.first, np.arange(self.problem.chain.end + 2))
        self._costs = np.unique(self.cost_us)

    def lowest_us(self, ceiling_us: float) -> float | None:
        """The smallest T at which the relaxation has a plan, if it is below ``ceiling_us``."""
        low, high = 0, int(np.searchsorted(self._costs, ceiling_us))  # costs[:high] are those below
        if high == 0 or self.fewest_devices(self._costs[high - 1]) is None:
            return None
        while low < high - 1:  # a plan with costs[:high], none with costs[:low]
            middle = (low + high) // 2
            low, high = (low, middle) if self.fewest_devices(self._costs[middle - 1]) is not None else (middle, high)
        return float(self._costs[high - 1])

    def fewest_devices(self, time_us: float) -> int | None:
        """Of a relaxed plan within ``time_us``; None when there is none."""
        fewest = int(self._from_end(time_us)[0, self._wanted])
        return fewest // self._device if fewest < NEVER else None

    def _within(self, cut: int, time_us: float) -> slice:
        """The candidates that begin at a cut and cost at most so much."""
        a, b = self._begins[cut], self._begins[cut + 1]
        return slice(a, a + int(np.searchsorted(self.cost_us[a:b], time_us, side="right")))

    def _from_end(self, time_us: float) -> Ints:
        """For each cut and state, the least weight of stages that run the layers after the cut."""
        if self._known is not None and self._known[0] == time_us:
            return self._known[1]
        n = self.problem.chain.end
        reached = np.full((n + 1, self._wanted + 2), NEVER, dtype=np.int64)
        reached[n, 0] = 0
        for cut in reversed(range(n)):
            part = self._within(cut, time_us)
            if part.start == part.stop:
                continue
            target, weights = self._extended(reached, part)
            if self._wanted == 0:  # one state only
                reached[cut, 0] = weights.min()
            else:
                np.minimum.at(reached[cut], target, weights)
                reached[cut, -1] = NEVER
        self._known = (time_us, reached)
        return reached

    def _extended(self, reached: Ints, part: slice) -> tuple[Ints, Ints]:
        """States and weights when each of the candidates comes before each state at its end."""
        after = reached[self.last[part], :-1]
        weights = after + self._weight[part, None]
        limits = np.minimum(self.max_after[part], self.scenario.max_devices - self.replicas[part])
        return self._next[self.mask[part]], np.where(after < (limits[:, None] + 1) * self._device, weights, NEVER)

    def path(self, time_us: float) -> list[tuple[int, int, int]]:
        """Stages (first, last, replicas) of a relaxed plan within ``time_us`` on the fewest devices; [] if there is none."""
        reached = self._from_end(time_us)
        cut, state = 0, self._wanted
        stages: list[tuple[int, int, int]] = []
        while cut < self.problem.chain.end and reached[cut, state] < NEVER:
            part = self._within(cut, time_us)
            target, weights = self._extended(reached, part)
            choice, rest = np.argwhere((target == state) & (weights == reached[cut, state]))[0].tolist()  # the cheapest
            last = int(self.last[part][choice])
            stages.append((cut, last, int(self.replicas[part][choice])))
            cut, state = last, rest
        return stages

    def _from_start(self, time_us: float) -> Ints:
        """For each cut, the least weight of stages that run the layers before it, memory and batch aside."""
        before = np.full(self.problem.chain.end + 1, NEVER, dtype=np.int64)
        before[0] = 0
        for cut in range(self.problem.chain.end):
            if before[cut] < NEVER:
                part = self._within(cut, time_us)
                np.minimum.at(before, self.last[part], before[cut] + self._weight[part])
        return before

    def useful(self, time_us: float, *, fewest: bool = False) -> list[Candidate]:
        """The candidates of cost <= ``time_us`` that some plan within the device count could contain.

        ``fewest``: only those of plans with the fewest devices, and of these the fewest stages; where very many tie, some.
        """
        reached = self._from_end(time_us)
        before, after = self._from_start(time_us)[self.first], reached[:, :-1].min(axis=1)[self.last]
        kept = (self.cost_us <= time_us) & (after < (self.max_after + 1) * self._device)
        if fewest:
            kept &= before + self._weight + after <= reached[0, self._wanted]
            kept &= np.cumsum(kept) <= MOST_TIES
            for first, last, r in self.path(time_us):  # one plan is complete in any case
                part = self._within(first, time_us)
                kept[part.start:part.stop] |= (self.last[part] == last) & (self.replicas[part] == r)
        else:
            kept &= before // self._device + self.replicas + after // self._device <= self.scenario.max_devices
        columns = (array[kept].tolist() for array in (self.cost_us, self.first, self.last, self.replicas, self.max_after))
        return sorted(Candidate(cost, first, last, (), r, limit) for cost, first, last, r, limit in zip(*columns, strict=True))


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
