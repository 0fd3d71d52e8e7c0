"""A lower bound that names no place: every stage on the best devices and links its replica count could have.

For a time T, a dynamic program over the cuts from the end finds the fewest devices with which
candidates of cost <= T reach each cut. Fewer devices after a stage never hurt it (less in flight,
less memory), so the fewest are enough to know. On one server with equal devices nothing is relaxed,
and the bound is the optimum; in general it prunes what :mod:`planner.search.ilp` is asked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
import numpy as np
import numpy.typing as npt

from planner.hardware.topology import Site, Topology
from planner.search.columns import Candidate, CandidateTable
from planner.search.loose import Loose
from planner.search.problem import Problem, Scenario, prime_powers, scenarios
from planner.search.stage_arrays import least_before, stage_arrays

__all__ = ["Bound", "best_sites", "longer_batches_us", "may_be_below"]

Ints = npt.NDArray[np.int64]
NEVER = 1 << 50  # weight of what cannot be reached
_CLOSE = 1.001  # bounds nearer than this: perhaps the upper one is the answer
MOST_TIES = 600  # candidates of equally good plans, of which more say nothing new


class Bound:
    """The position-free relaxation of one scenario.

    Candidates stand in arrays, by ``first``, ``last`` and replicas. A *state* is the prime powers of the batch that a
    replica count covers already (a bit each) and, when the number of stages is fixed, how many there are so
    far (above those bits). What is least is a *weight*: devices first, and then stages.
    """

    def __init__(self, problem: Problem, scenario: Scenario, sites: list[Site], kept: Ints | None = None) -> None:
        self.problem, self.scenario = problem, scenario
        self.kept = kept  # the stages to look at, as indices of planner.search.stage_arrays; None: all
        self.table = CandidateTable(problem, scenario)
        powers = prime_powers(scenario.multiple) if scenario.exact else ()
        one_stage = (1 << len(powers)) if problem.stages is not None else 0
        self._wanted = (problem.stages or 0) << len(powers) | (1 << len(powers)) - 1
        self._sites = [site for site in sites[: min(problem.max_replicas, scenario.max_devices)] if scenario.admits(site.replicas)]
        self._masks = [sum(1 << b for b, power in enumerate(powers) if site.replicas % power == 0) for site in self._sites]
        states = np.arange(self._wanted + 1)
        after = (states[None, :] | np.arange(1 << len(powers))[:, None]) + one_stage
        self._next = np.where(after <= self._wanted, after, self._wanted + 1)  # by mask and state; the last is nowhere
        self._device = problem.chain.end + 2  # weight of a device; a stage weighs one
        self._known: dict[float, tuple[_Chosen, Ints]] = {}

    @cached_property
    def _all(self) -> _Chosen:
        """The candidates that fit their devices under some circumstances."""
        stages = stage_arrays(self.problem.chain)
        stages = stages if self.kept is None else stages.some(self.kept)
        choices = self.problem.recompute_choices
        ways = [(site, mask, recompute) for site, mask in zip(self._sites, self._masks, strict=True) for recompute in choices]
        costs, limits = [], []
        for site, _, recompute in ways:
            costs.append(stages.cost_us(self.problem, self.scenario, site, recompute))
            limits.append(stages.max_after(self.problem, self.scenario, site, recompute))
            if recompute and len(choices) > 1:  # only where more may then come after the stage
                limits[-1] = np.where(limits[-1] > limits[-2], limits[-1], -1)
        cost, limit = np.stack(costs, axis=1).ravel(), np.stack(limits, axis=1).ravel()
        each, count = len(ways), len(stages.first)
        replicas = np.tile(np.array([site.replicas for site, _, _ in ways], dtype=np.int64), count)
        mask = np.tile(np.array([mask for _, mask, _ in ways], dtype=np.int64), count)
        again = np.tile(np.array([recompute for _, _, recompute in ways], dtype=np.bool_), count)
        everything = _Chosen(stages.first.repeat(each), stages.last.repeat(each), cost, replicas, limit, mask, again)
        return everything if (limit >= 0).all() else everything.some(np.flatnonzero(limit >= 0))

    def lowest_us(self, ceiling_us: float, tolerance: float = 0.0) -> float | None:
        """The smallest T at which the relaxation has a plan, if it is below ``ceiling_us``; too low by ``tolerance`` at most."""
        costs = self._all.cost_us
        high_us, low_us = self._below(ceiling_us), self._busy_us  # a plan within high, none within low
        if high_us is None or self.fewest_devices(high_us) is None:
            return None
        tried, high_us = False, self._slowest(high_us)
        while high_us > low_us * (1 + tolerance):
            close = not tried and high_us <= low_us * _CLOSE
            trial_us = self._below(high_us) if close else self._below(np.nextafter((low_us + high_us) / 2, math.inf))
            if trial_us is None or trial_us <= low_us:  # no candidate costs that; the next dearer one does
                trial_us = float(costs[costs > low_us].min())
                if trial_us >= high_us:
                    return high_us
            tried = close
            if self.fewest_devices(trial_us) is not None:
                high_us = self._slowest(trial_us)
            else:
                low_us = trial_us
        return high_us if tolerance == 0 else min(high_us, low_us)

    def _below(self, time_us: float) -> float | None:
        """The largest cost of a candidate below a time."""
        highest_us = float(self._all.cost_us[self._all.cost_us < time_us].max(initial=-1.0))
        return highest_us if highest_us >= 0 else None

    def _slowest(self, time_us: float) -> float:
        """The largest cost on a path within ``time_us``, which exists."""
        chosen, _ = self._from_end(time_us)
        return max(float(chosen.cost_us[chosen.where(*stage)][0]) for stage in self.path(time_us))

    @property
    def _busy_us(self) -> float:
        """Below this no plan can be: devices without a pause. A little less, as sums are rounded."""
        compute_us = self.problem.chain.compute_us[self.problem.chain.end]
        fastest = max((site.speed for site in self._sites), default=1.0)
        return compute_us / fastest / self.scenario.max_devices * (1 - 1e-9) - 1e-9

    def fewest_devices(self, time_us: float) -> int | None:
        """Of a relaxed plan within ``time_us``; None when there is none."""
        fewest = int(self._from_end(time_us)[1][0, self._wanted])
        return fewest // self._device if fewest < NEVER else None

    def _from_end(self, time_us: float) -> tuple[_Chosen, Ints]:
        """The candidates within a time, and for each cut and state the least weight of stages that run the layers after the cut."""
        if time_us not in self._known:
            chosen = self._all.some(np.flatnonzero(self._all.cost_us <= time_us))
            self._known = {time_us: (chosen, self._reached(chosen))}  # the last answer only: it is often asked for again
        return self._known[time_us]

    def _reached(self, chosen: _Chosen) -> Ints:
        n, chosen = self.problem.chain.end, chosen.undominated()
        begins = chosen.begins(n)
        weight = chosen.replicas * self._device + 1
        limit = (np.minimum(chosen.max_after, self.scenario.max_devices - chosen.replicas) + 1) * self._device
        target = self._next[chosen.mask]
        reached = np.full((n + 1, self._wanted + 2), NEVER, dtype=np.int64)
        reached[n, 0] = 0
        for cut in reversed(range(n)):
            a, b = begins[cut], begins[cut + 1]
            if a == b:
                continue
            if self._wanted == 0:  # one state only
                after = reached[chosen.last[a:b], 0]
                reached[cut, 0] = np.where(after < limit[a:b], after + weight[a:b], NEVER).min()
            else:
                after = reached[chosen.last[a:b], :-1]
                np.minimum.at(reached[cut], target[a:b], np.where(after < limit[a:b, None], after + weight[a:b, None], NEVER))
                reached[cut, -1] = NEVER
        return reached

    def path(self, time_us: float) -> list[tuple[int, int, int, bool]]:
        """Stages (first, last, replicas, recompute) of a relaxed plan within ``time_us`` on the fewest devices; [] if there is none."""
        chosen, reached = self._from_end(time_us)
        cut, state, begins = 0, self._wanted, chosen.begins(self.problem.chain.end)
        stages: list[tuple[int, int, int, bool]] = []
        while cut < self.problem.chain.end and reached[cut, state] < NEVER:
            part = chosen.some(np.arange(begins[cut], begins[cut + 1]))
            after = reached[part.last, :-1]
            limit = (np.minimum(part.max_after, self.scenario.max_devices - part.replicas) + 1) * self._device
            right = (self._next[part.mask] == state) & (after < limit[:, None])
            right &= after + (part.replicas * self._device + 1)[:, None] == reached[cut, state]
            choice = min(np.flatnonzero(right.any(axis=1)).tolist(), key=lambda index: part.cost_us[index])
            stages.append((cut, int(part.last[choice]), int(part.replicas[choice]), bool(part.recompute[choice])))
            cut, state = int(part.last[choice]), int(np.argmax(right[choice]))
        return stages

    def useful(self, time_us: float, *, fewest: bool = False) -> list[Candidate]:
        """The candidates of cost <= ``time_us`` that some plan within the device count could contain.

        ``fewest``: only those of plans with the fewest devices, and of these the fewest stages; where very many tie, some.
        """
        chosen, reached = self._from_end(time_us)
        before, after = self._from_start(chosen)[chosen.first], reached[:, :-1].min(axis=1)[chosen.last]
        kept = after < (chosen.max_after + 1) * self._device
        if fewest:
            kept &= before + chosen.replicas * self._device + 1 + after <= reached[0, self._wanted]
            kept &= np.cumsum(kept) <= MOST_TIES
            for stage in self.path(time_us):  # one plan is complete in any case
                kept |= chosen.where(*stage)
        else:
            kept &= before // self._device + chosen.replicas + after // self._device <= self.scenario.max_devices
        return sorted(chosen.some(np.flatnonzero(kept)).candidates())

    def _from_start(self, chosen: _Chosen) -> Ints:
        """For each cut, the least weight of stages that run the layers before it, memory and batch aside."""
        return least_before(chosen.begins(self.problem.chain.end), chosen.last, chosen.replicas * self._device + 1, NEVER)


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Candidates as arrays, by ``first``."""

    first: Ints
    last: Ints
    cost_us: npt.NDArray[np.float64]
    replicas: Ints
    max_after: Ints
    mask: Ints
    recompute: npt.NDArray[np.bool_]

    def where(self, first: int, last: int, replicas: int, recompute: bool) -> npt.NDArray[np.bool_]:
        """Which of them is this stage."""
        found: npt.NDArray[np.bool_] = ((self.first == first) & (self.last == last) & (self.replicas == replicas)
                                        & (self.recompute == recompute))
        return found

    def some(self, indices: Ints) -> _Chosen:
        """These of them."""
        return _Chosen(self.first[indices], self.last[indices], self.cost_us[indices], self.replicas[indices], self.max_after[indices],
                       self.mask[indices], self.recompute[indices])

    def undominated(self) -> _Chosen:
        """Without those whose neighbour is the same stage on fewer devices, and as good in every respect."""
        same = (self.first[1:] == self.first[:-1]) & (self.last[1:] == self.last[:-1])
        covers = (self.mask[1:] & ~self.mask[:-1]) == 0
        worse = same & covers & (self.max_after[1:] <= self.max_after[:-1])
        return self.some(np.flatnonzero(np.concatenate([[True], ~worse]))) if worse.any() else self

    def begins(self, end: int) -> list[int]:
        """Where those of each cut begin, and one more."""
        found: list[int] = np.searchsorted(self.first, np.arange(end + 2)).tolist()
        return found

    def candidates(self) -> list[Candidate]:
        """One by one."""
        columns = (array.tolist() for array in (self.cost_us, self.first, self.last, self.replicas, self.max_after, self.recompute))
        return [Candidate(cost, first, last, (), r, limit, again) for cost, first, last, r, limit, again in zip(*columns, strict=True)]


def may_be_below(problem: Problem, time_us: float, deadline: float | None = None) -> bool:
    """False where no plan of the problem can be faster than that."""
    sites = best_sites(problem.topology, min(problem.max_replicas, problem.max_devices))
    return Loose(problem, scenarios(problem), sites, None, deadline).lowest_us(time_us, 1e-4) is not None


def longer_batches_us(problem: Problem, ceiling_us: float = math.inf, tolerance: float = 1e-9,
                      deadline: float | None = None, than: int = 0) -> float | None:
    """What plans could reach with batches longer than the least common multiple of their replica counts, or than the number of devices.

    A lower bound, from the largest multiple that counts adding up to the devices can have, and lower by at most
    ``tolerance``. None when the batch is given, that multiple is not longer than ``than``, or nothing is below ``ceiling_us``.
    """
    most = problem.max_devices
    longest = max(_longest_multiple(most), most)
    if problem.batch_microbatches is not None or problem.policy in ("2bw", "flush") or problem.equal_replicas or longest <= than:
        return None
    scenario = Scenario(longest, math.lcm(*range(1, most + 1)), False, 1, most)
    sites = best_sites(problem.topology, min(problem.max_replicas, most))
    bounds = Loose(problem, [scenario], sites, None, deadline).lowest_us(ceiling_us, tolerance)
    return None if bounds is None else bounds[0]


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
