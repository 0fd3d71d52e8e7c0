"""Every way to lay a stage beside those after it, on real places: states, and steps between them, as arrays.

A *state* is what matters of the stages from a cut on: the devices ``u`` that they take from each place, and the
pattern ``q`` (:meth:`planner.hardware.topology.Topology.pattern`) of the first of them. Places that differ in name
only are sorted, most devices first, so that states which differ by an exchange of names are one::

    stage on (0, 2) before stages on (1, 0)      u = (1, 2), q = (0, 1)      is      u = (2, 1), q = (1, 0)

A *head* is a ``u`` and the pattern of a stage that is to come before it, with the names of the state after it. A *step* adds that
stage; the loads of links then follow the places to where sorting puts them.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache

import networkx as nx
import numpy as np
import numpy.typing as npt

from planner.hardware.topology import Allocation, Site, Topology

__all__ = ["Placings", "placings"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
MOST_PLACES = 8
MOST_ALLOCATIONS = 7_000  # of devices to a stage
MOST_STEPS = 120_000
MOST_TRANSFERS = 1_500_000  # pairs of a head and a state; more take seconds to list
MOST_NAMES = 24  # ways to exchange the names of places, all of which are tried


@lru_cache(maxsize=4)
def placings(topology: Topology, most_replicas: int) -> Placings | None:
    """Of a topology, once; None where there are too many to be listed."""
    found = Placings(topology, most_replicas)
    return found if found.complete else None


class Placings:
    """The states, heads and steps of a topology for stages of at most ``most_replicas`` replicas.

    Loads stand by link, up and then down. ``transfer_*`` are pairs of a head and a state after it, by state;
    ``step_*`` are steps by allocation and then by devices after it.
    """

    def __init__(self, topology: Topology, most_replicas: int) -> None:
        self.topology = topology
        self.links = len(topology.shared)
        self._byte_us = np.array([1e6 / link.link.bandwidth_bytes_per_s for link in topology.shared])
        joined = nx.Graph(topology.interchangeable)
        self._groups = [sorted(group) for group in nx.connected_components(joined)]
        self._own = {p: [i for i, link in enumerate(topology.shared) if link.below == {p}] for p in range(len(topology.places))}
        self._shares: dict[tuple[Allocation, Allocation], list[tuple[float, float]]] = {}
        capacities = topology.capacities
        self._named = tuple(range(len(topology.places)))
        self._exchanges = math.prod(math.factorial(len(group)) for group in self._groups)  # ways to exchange names
        few = len(capacities) <= MOST_PLACES and math.prod(c + 1 for c in capacities) <= MOST_ALLOCATIONS
        self.complete = few and math.prod((c + 1) * (c + 2) // 2 for c in capacities) // self._exchanges <= MOST_STEPS
        if self.complete:
            every = itertools.product(*(range(c + 1) for c in capacities))
            self.allocations = [a for a in every if 0 < sum(a) <= most_replicas]
            self._build(capacities)

    def _sorted_by(self, *keys: Allocation) -> tuple[int, ...]:
        """Where each place is taken from when interchangeable ones are sorted by these, the largest first."""
        if not self._groups:
            return self._named
        order = list(self._named)
        for group in self._groups:
            best = sorted(group, key=lambda p: tuple(-key[p] for key in keys))
            for place, source in zip(group, best, strict=True):
                order[place] = source
        return tuple(order)

    def _build(self, capacities: Allocation) -> None:
        nothing = (0,) * len(capacities)
        states: dict[tuple[Allocation, Allocation], int] = {(nothing, nothing): 0}
        heads: dict[tuple[Allocation, Allocation], int] = {}
        steps: list[tuple[int, int, int, int, int]] = []  # allocation, devices after, head, state, order
        orders: dict[tuple[int, ...], int] = {}
        waiting, seen = [nothing], {nothing}
        every, most = np.array(self.allocations).reshape(-1, len(capacities)), np.array(capacities)
        while waiting:
            if len(steps) > MOST_STEPS:
                self.complete = False
                return
            u = waiting.pop()
            for index in np.flatnonzero((every + np.array(u) <= most).all(axis=1)).tolist():
                a = self.allocations[index]
                if u == nothing and self._moved(a):
                    continue
                pattern, total = self.topology.pattern(a), tuple(map(int.__add__, u, a))
                head = heads.setdefault((u, pattern), len(heads))
                order = self._sorted_by(total, pattern)
                after, q = (total, pattern) if order == self._named else (tuple(total[p] for p in order), tuple(pattern[p] for p in order))
                state = states.setdefault((after, q), len(states))
                steps.append((index, sum(u), head, state, orders.setdefault(order, len(orders))))
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        self.states, self.heads, self.orders = list(states), list(heads), list(orders)
        table = np.array(sorted(steps), dtype=np.int64).reshape(-1, 5)
        self.step_allocation, self.step_after, self.step_head, self.step_state, self.step_order = table.T
        self.state_devices = np.array([sum(u) for u, _ in self.states])
        self.last_heads = np.array([head for head, (u, _) in enumerate(self.heads) if u == nothing])  # before nothing
        self.counts = np.array([sum(a) for a in self.allocations])
        kinds: dict[Allocation, int] = {}
        self.patterns = np.array([kinds.setdefault(self.topology.pattern(a), len(kinds)) for a in self.allocations])
        self.sites: dict[Site, list[int]] = {}
        self.ring_us = np.zeros((len(self.allocations), 2 * self.links))  # for a byte over every link of the ring
        for index, a in enumerate(self.allocations):
            self.sites.setdefault(self.topology.site(a), []).append(index)
            for link in self.topology.ring(a).shared:
                self.ring_us[index, [link, self.links + link]] = self._byte_us[link]
        width = sum(capacities) + 2
        wanted = np.arange(len(self.allocations))[:, None] * width + np.arange(width)
        self.step_bounds = np.searchsorted(self.step_allocation * width + self.step_after, wanted)  # by allocation and devices after it
        self.link_orders = np.array([self._links_of(order) for order in self.orders], dtype=np.int64).reshape(len(orders), 2 * self.links)
        self._pair()

    def _moved(self, a: Allocation) -> bool:
        return tuple(a[p] for p in self._sorted_by(a)) != a

    def _links_of(self, order: tuple[int, ...]) -> list[int]:
        """For each load, up and down a link, from which it is taken when places are sorted so."""
        source = list(range(self.links))
        for place, origin in enumerate(order):
            for mine, theirs in zip(self._own[place], self._own[origin], strict=True):
                source[mine] = theirs
        return source + [self.links + link for link in source]

    def _share(self, sender: Allocation, receiver: Allocation) -> list[tuple[float, float]]:
        """Of what is sent, the least that leaves and enters through each link, whatever the names of interchangeable places are.

        Only the order of replicas depends on names (:meth:`planner.hardware.topology.Topology.order`).
        """
        if not self._groups:
            return list(self.topology.crossings(sender, receiver))
        order = self._sorted_by(sender, receiver)
        key = (tuple(sender[p] for p in order), tuple(receiver[p] for p in order))
        if key not in self._shares:
            self._shares[key] = self._least_share(*key)
        links = self._links_of(order)
        found = [(0.0, 0.0)] * self.links
        for link in range(self.links):
            found[links[link]] = self._shares[key][link]
        return found

    def _least_share(self, sender: Allocation, receiver: Allocation) -> list[tuple[float, float]]:
        if math.gcd(sum(sender), sum(receiver)) == 1:
            return list(self.topology.crossings(sender, receiver))  # everybody sends to everybody, as much
        if self._exchanges > MOST_NAMES:
            return list(self.topology.least_crossings(sender, receiver))
        least = [(math.inf, math.inf)] * self.links
        for names in itertools.product(*(itertools.permutations(group) for group in self._groups)):
            order = list(range(len(sender)))
            for group, other in zip(self._groups, names, strict=True):
                for place, source in zip(group, other, strict=True):
                    order[place] = source
            one = tuple(sender[p] for p in order), tuple(receiver[p] for p in order)
            links, real = self._links_of(tuple(order)), self.topology.crossings(*one)
            for link, share in enumerate(real):
                least[links[link]] = (min(least[links[link]][0], share[0]), min(least[links[link]][1], share[1]))
        return least

    def _pair(self) -> None:
        """Heads and the states after them, and what a byte sent from one to the other, or back, adds to each link, in microseconds."""
        kinds: dict[Allocation, int] = {}
        before, after = ([(u, kinds.setdefault(pattern, len(kinds))) for u, pattern in nodes] for nodes in (self.heads, self.states))
        heads, states = _grouped(before), _grouped(after)
        count = sum(len(heads[u]) * len(states[u]) for u in heads if u in states and any(u))
        if count > MOST_TRANSFERS:
            self.complete = False
            return
        pairs = [(np.repeat(states[u], len(heads[u])), np.tile(heads[u], len(states[u]))) for u in heads if u in states and any(u)]
        state = np.concatenate([one for one, _ in pairs]) if pairs else np.zeros(0, dtype=np.int64)
        head = np.concatenate([one for _, one in pairs]) if pairs else np.zeros(0, dtype=np.int64)
        sends, receives = (np.array([kind for _, kind in nodes], dtype=np.int64) for nodes in (before, after))
        keys, share = np.unique(sends[head] * len(kinds) + receives[state], return_inverse=True)
        patterns = list(kinds)
        shares = [self._share(patterns[key // len(kinds)], patterns[key % len(kinds)]) for key in keys.tolist()]
        sizes = np.array([sum(pattern) for pattern in patterns])[sends]
        width = sum(self.topology.capacities) + 2
        order = np.argsort(state * width + sizes[head], kind="stable")
        self.transfer_head, self.transfer_share = head[order], share[order]
        wanted = np.arange(len(self.states))[:, None] * width + np.arange(width)
        self.transfer_bounds = np.searchsorted((state * width + sizes[head])[order], wanted)  # by state and size of the head's pattern
        both = np.array(shares).reshape(len(shares), self.links, 2)
        self.leaves_us, self.enters_us = both[:, :, 0] * self._byte_us, both[:, :, 1] * self._byte_us


def _grouped(nodes: list[tuple[Allocation, int]]) -> dict[Allocation, Ints]:
    """The numbers of the nodes by their devices."""
    found: dict[Allocation, list[int]] = {}
    for number, (u, _) in enumerate(nodes):
        found.setdefault(u, []).append(number)
    return {u: np.array(numbers) for u, numbers in found.items()}
