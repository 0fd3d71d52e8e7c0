"""The path network in full: nodes know the devices taken at each place and the pattern of the next stage.

Written from the last stage to the first. ``u`` are the devices that the stages after a cut take from
each place; ``p`` is the pattern (:meth:`planner.hardware.topology.Topology.pattern`) of the stage on that side::

    begin (i, u + a, p) -- stage [i, j) on allocation a, of pattern p --> end (j, u, p)
    end (j, u, p) ------ transfer between patterns p and q at cut j ----> begin (j, u, q)

Capacity, memory and the load of every transfer are then properties of single nodes and arcs, and a
path obeys them by itself; only the sums of loads are left to rows. Arcs through which no path can
keep the loads within T are removed: what a path carries over each link is at least the least load
from the start, its own, and the least load to the end.

Equal places differ by name only, so of those still free the first ones are to be taken first and most
from. Exchanging them does not change what a plan costs except in one detail: the order of replicas
breaks ties by place (:meth:`planner.hardware.topology.Topology.order`), so some odd allocations pair up better
under one name than under another. The *relaxed* network therefore lets every pair of allocations keep
as much inside as their shares allow. What it finds is evaluated; where a plan is slower than promised,
the network is built again with real pairs and all names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import add, gt
from typing import NamedTuple

from planner.cost import ring_bytes
from planner.hardware.topology import Allocation
from planner.search.columns import Candidate
from planner.search.problem import Problem, Scenario
from planner.search.work import Work, is_late

__all__ = ["Arc", "Node", "network"]

Node = tuple[int, bool, Allocation, Allocation]  # cut, whether a stage begins here, devices after, pattern
Load = tuple[float, ...]  # up and down each shared link, in units of what it carries in T


_ARC = 5  # units of work that an arc takes; a candidate that is looked at takes one


class Arc(NamedTuple):
    """A stage (``candidate``) or a transfer (None)."""

    candidate: Candidate | None
    tail: Node
    head: Node
    load: Load


def network(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, *,
            relaxed: bool, most_arcs: int, work: Work, deadline: float | None = None) -> list[Arc] | None:
    """The arcs that some path within the loads may use; None when there are too many to be worth it, or no time or work is left."""
    builder = _Builder(problem, scenario, candidates, time_us, relaxed)
    work.left -= len(candidates)
    arcs = builder.build(min(most_arcs, work.left // _ARC), deadline) if work.left > 0 else None
    work.left -= len(builder.arcs) * _ARC
    return arcs


class _Builder:
    def __init__(self, problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float,
                 relaxed: bool) -> None:
        self.problem, self.scenario = problem, scenario
        self.candidates = sorted(candidates, key=lambda c: (-c.first, c.last, c.replicas, c.allocation))
        links = [link.link.bandwidth_bytes_per_s for link in problem.topology.shared]
        self.units = [1e6 / (bandwidth * time_us) for bandwidth in links]
        self.nothing: Load = (0.0,) * (2 * len(links))
        self.classes = problem.topology.interchangeable if relaxed else []
        self.crossings = problem.topology.least_crossings if relaxed else problem.topology.crossings
        self.before = _fewest_before(problem, self.candidates)
        self.shares: dict[tuple[Allocation, Allocation], list[tuple[float, float]]] = {}  # of what crosses, in units of what a link carries
        self.arcs: list[Arc] = []
        self.to_end: dict[Node, Load] = {}  # least load from a node to the end, link by link
        self.begins: dict[int, dict[Allocation, list[Node]]] = defaultdict(lambda: defaultdict(list))

    def build(self, most_arcs: int, deadline: float | None) -> list[Arc] | None:
        n, none = self.problem.chain.end, (0,) * len(self.problem.topology.places)
        for c in self.candidates:
            for after in [none] if c.last == n else list(self.begins[c.last]):
                if self._fits(c, after):
                    self._add_stage(c, after)
            if len(self.arcs) > most_arcs or is_late(deadline):
                return None
        return self._reachable()

    def _fits(self, c: Candidate, after: Allocation) -> bool:
        """Devices, memory, and of interchangeable places that are still free, the first ones taken most from."""
        devices = sum(after)
        if devices > c.max_after or self.before[c.first] + c.replicas + devices > self.scenario.max_devices:
            return False
        if any(map(gt, map(add, after, c.allocation), self.problem.topology.capacities)):
            return False
        return all(c.allocation[p] >= c.allocation[q] or after[p] or after[q] for p, q in self.classes)

    def _add_stage(self, c: Candidate, after: Allocation) -> None:
        pattern = self.problem.topology.pattern(c.allocation)
        head: Node = (c.last, False, after, pattern)
        if head not in self.to_end:
            self._add_transfers(head)
        load = self._ring_load(c)
        rest = self.to_end[head]
        total = tuple(map(add, load, rest))
        if not _within(total):
            return
        tail: Node = (c.first, True, tuple(map(add, after, c.allocation)), pattern)
        self.arcs.append(Arc(c, tail, head, load))
        if tail in self.to_end:
            self.to_end[tail] = tuple(map(min, self.to_end[tail], total))
        else:
            self.to_end[tail] = total
            self.begins[c.first][tail[2]].append(tail)

    def _add_transfers(self, head: Node) -> None:
        """The transfers from a stage's end to every stage that may begin there; all of those are known by now."""
        cut, _, after, pattern = head
        if cut == self.problem.chain.end:
            self.to_end[head] = self.nothing
            return
        least = (float("inf"),) * len(self.nothing)
        for begin in self.begins[cut][after]:
            load = self._transfer_load(cut, pattern, begin[3])
            total = tuple(map(add, load, self.to_end[begin]))
            if _within(total):
                self.arcs.append(Arc(None, head, begin, load))
                least = tuple(map(min, least, total))
        self.to_end[head] = least

    def _ring_load(self, c: Candidate) -> Load:
        crossed = self.problem.topology.ring(c.allocation).shared
        if not crossed:
            return self.nothing
        parameters = self.problem.chain.parameter_bytes
        ring = ring_bytes(parameters[c.last] - parameters[c.first], c.replicas, self.scenario.batch_microbatches)
        return tuple(ring * unit if index in crossed else 0.0 for index, unit in enumerate(self.units) for _ in ("up", "down"))

    def _transfer_load(self, cut: int, sender: Allocation, receiver: Allocation) -> Load:
        forward, gradient = self.problem.chain.forward_bytes[cut], self.problem.chain.gradient_bytes[cut]
        if (sender, receiver) not in self.shares:
            self.shares[sender, receiver] = [(unit * leaves, unit * enters) for unit, (leaves, enters)
                                             in zip(self.units, self.crossings(sender, receiver), strict=True)]
        load: list[float] = []
        for leaves, enters in self.shares[sender, receiver]:
            load += (forward * leaves + gradient * enters, forward * enters + gradient * leaves)
        return tuple(load)

    def _reachable(self) -> list[Arc]:
        """The arcs on a path from the start that keeps within the loads, as far as least loads can tell."""
        from_start: dict[Node, Load] = {}
        for cut in (0,):
            for nodes in self.begins[cut].values():
                from_start.update(dict.fromkeys(nodes, self.nothing))
        kept = []
        # By cut, and at a cut transfers before the stages that begin there: a node's load is final before it is used.
        for arc in sorted(self.arcs, key=lambda arc: (arc.tail[0], arc.tail[1])):
            start = from_start.get(arc.tail)
            if start is None:
                continue
            here = tuple(map(add, start, arc.load))
            if _within(tuple(map(add, here, self.to_end[arc.head]))):
                kept.append(arc)
                from_start[arc.head] = tuple(map(min, from_start[arc.head], here)) if arc.head in from_start else here
        return kept


def _fewest_before(problem: Problem, candidates: Sequence[Candidate]) -> dict[int, int]:
    """For each cut, the fewest devices with which candidates run the layers before it."""
    before = dict.fromkeys(range(problem.chain.end + 1), problem.max_devices + 1)
    before[0] = 0
    for c in sorted(candidates, key=lambda c: c.first):
        before[c.last] = min(before[c.last], before[c.first] + c.replicas)
    return before


def _within(load: Load) -> bool:
    return max(load, default=0.0) <= 1 + 1e-9
