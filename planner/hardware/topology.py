"""The hardware graph: where devices stand, and which links a stage's traffic uses.

Devices that are alike are counted, not named: a *place* is a set of equal devices under one parent
(the devices of a server), and an *allocation* says how many devices of each place a stage takes.
Each device has its own link to the parent; the links of servers and switches are *shared*::

    root -- shared link of server0 -- server0 -- place 0: 4 devices, a link each
         \\- shared link of server1 -- server1 -- place 1: 4 devices, a link each
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import networkx as nx

from planner.spec.cluster import Cluster, DeviceType, Link, Node

__all__ = ["Allocation", "Place", "Ring", "SharedLink", "Site", "Topology"]

Allocation = tuple[int, ...]  # devices taken from each place
_ROOT = ""


@dataclass(frozen=True)
class Place:
    """``count`` equal devices called ``prefix0``, ``prefix1``, ... under ``parent`` (a path, "" for the root)."""

    parent: str
    prefix: str
    count: int
    device_type: DeviceType
    link: Link

    def device(self, index: int) -> str:
        """Path of a device."""
        return f"{self.prefix}{index}"


@dataclass(frozen=True)
class SharedLink:
    """The link above the server or switch ``name``, and the places whose traffic leaves through it."""

    name: str
    link: Link
    below: frozenset[int]


@dataclass(frozen=True)
class Ring:
    """An all-reduce ring through the devices of an allocation, in tree order.

    In that order it enters and leaves each server once, so every shared link between its devices
    carries the ring's traffic once in each direction.
    """

    bandwidth_bytes_per_s: float  # of the slowest link on it
    latency_us: float  # of the longest hop on it
    shared: tuple[int, ...]  # shared links it crosses


class Site(NamedTuple):
    """What a stage's time and memory depend on: of its slowest, smallest device and its slowest link."""

    replicas: int
    speed: float
    memory_bytes: int | None  # None when no limit is known
    device_bandwidth_bytes_per_s: float
    ring_bandwidth_bytes_per_s: float
    ring_latency_us: float


class Topology:
    """Places and shared links of a cluster, from its networkx graph (groups and places; devices counted)."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.graph = nx.DiGraph()  # a tree, edges from parent to child
        self.graph.add_node(_ROOT)
        places: list[Place] = []
        self._grow(_ROOT, cluster.nodes, {kind.name: kind for kind in cluster.device_types}, places)
        self.places = tuple(places)
        self.shared = tuple(self._shared_links())
        self._sites: dict[Allocation, Site] = {}
        self._rings: dict[Allocation, Ring] = {}
        self._orders: dict[Allocation, tuple[int, ...]] = {}
        self._crossing_us: dict[tuple[Allocation, Allocation], frozenset[tuple[float, float]]] = {}
        self._crossings: dict[tuple[Allocation, Allocation], tuple[tuple[float, float], ...]] = {}

    def _grow(self, parent: str, nodes: tuple[Node, ...], kinds: dict[str, DeviceType], places: list[Place]) -> None:
        above = f"{parent}/" if parent else ""
        for node in nodes:
            if node.device is not None:
                self.graph.add_edge(parent, ("place", len(places)), link=node.link)
                places.append(Place(parent, f"{above}{node.name}", node.count, kinds[node.device], node.link))
                continue
            for index in range(node.count):
                path = f"{above}{node.name}{index}"
                self.graph.add_edge(parent, path, link=node.link)
                self._grow(path, node.children, kinds, places)

    def _shared_links(self) -> list[SharedLink]:
        links = []
        for _, child, link in self.graph.edges.data("link"):
            if isinstance(child, str):
                below = frozenset(node[1] for node in nx.descendants(self.graph, child) if isinstance(node, tuple))
                if len(below) < len(self.places):  # a link above everything is never used
                    links.append(SharedLink(child, link, below))
        return links

    @property
    def device_count(self) -> int:
        return sum(place.count for place in self.places)

    @cached_property
    def fastest(self) -> float:
        """Speed of the fastest device."""
        return self.places[self.fastest_place].device_type.speed

    @cached_property
    def fastest_place(self) -> int:
        """The first place that has the fastest devices."""
        return max(range(len(self.places)), key=lambda p: (self.places[p].device_type.speed, -p))

    def alone(self, place: int) -> Allocation:
        """One device of a place."""
        return tuple(int(p == place) for p in range(len(self.places)))

    @cached_property
    def capacities(self) -> Allocation:
        """Devices of each place."""
        return tuple(place.count for place in self.places)

    @cached_property
    def interchangeable(self) -> list[tuple[int, int]]:
        """Neighbouring places that are equal, each behind an equal link of its own: their names carry no meaning."""
        return [(p, p + 1) for p in range(len(self.places) - 1) if self._alike(p, p + 1)]

    def _alike(self, p: int, q: int) -> bool:
        one, other = self.places[p], self.places[q]
        mine = [link.link for link in self.shared if link.below == {p}]
        theirs = [link.link for link in self.shared if link.below == {q}]
        between = sum((p in link.below) != (q in link.below) for link in self.shared)
        same = (one.count, one.device_type, one.link) == (other.count, other.device_type, other.link)
        return same and mine == theirs and between == 2 * len(mine)

    def site(self, allocation: Allocation) -> Site:
        """What a stage on these devices works with."""
        if allocation not in self._sites:
            used = [place for place, count in zip(self.places, allocation, strict=True) if count]
            limits = [place.device_type.memory_bytes for place in used]
            ring = self.ring(allocation)
            self._sites[allocation] = Site(
                replicas=sum(allocation),
                speed=min(place.device_type.speed for place in used),
                memory_bytes=min((limit for limit in limits if limit is not None), default=None),
                device_bandwidth_bytes_per_s=min(place.link.bandwidth_bytes_per_s for place in used),
                ring_bandwidth_bytes_per_s=ring.bandwidth_bytes_per_s,
                ring_latency_us=ring.latency_us,
            )
        return self._sites[allocation]

    def ring(self, allocation: Allocation) -> Ring:
        """The all-reduce ring through the allocation's devices (two or more)."""
        if allocation not in self._rings:
            used = [p for p, count in enumerate(allocation) if count]
            crossed = [i for i, link in enumerate(self.shared) if 0 < sum(p in link.below for p in used) < len(used)]
            bandwidth = min([self.places[p].link.bandwidth_bytes_per_s for p in used]
                            + [self.shared[i].link.bandwidth_bytes_per_s for i in crossed])
            hops = [(p, p) for p in used if allocation[p] > 1] + ([*itertools.pairwise(used), (used[-1], used[0])] if len(used) > 1 else [])
            self._rings[allocation] = Ring(bandwidth, max((self.latency_us(p, q) for p, q in hops), default=0.0), tuple(crossed))
        return self._rings[allocation]

    def latency_us(self, p: int, q: int) -> float:
        """Of the path from a device of place p to another device, of place q: the sum of its links'."""
        between = sum(link.link.latency_us for link in self.shared if (p in link.below) != (q in link.below))
        return self.places[p].link.latency_us + self.places[q].link.latency_us + between

    def order(self, allocation: Allocation) -> tuple[int, ...]:
        """The place of each replica, replica 0 first.

        Microbatch m goes to replica m mod r, so the order decides which transfers stay inside a
        server. The rule: the allocation divided by its greatest common divisor is dealt round
        robin over its places, and that pattern repeats. Allocations in the same proportions then
        pair up, whatever their sizes: nothing crosses between (1, 1) and (4, 4), or (2, 1) and (4, 2)::

            (2, 2) -> 0 1 0 1        (1, 3) -> 0 1 1 1        (4, 2) -> 0 1 0 0 1 0
        """
        if allocation not in self._orders:
            pattern = self.pattern(allocation)
            once = [p for turn in range(max(pattern)) for p, count in enumerate(pattern) if turn < count]
            self._orders[allocation] = tuple(once * math.gcd(*allocation))
        return self._orders[allocation]

    def pattern(self, allocation: Allocation) -> Allocation:
        """The allocation divided by its greatest common divisor: all that its pairing with others depends on."""
        divisor = math.gcd(*allocation)
        return tuple(count // divisor for count in allocation)

    def crossings(self, sender: Allocation, receiver: Allocation) -> tuple[tuple[float, float], ...]:
        """For each shared link, the share of microbatches that leaves (up) and enters (down) through it.

        Microbatch m goes from replica m mod r of one stage to replica m mod r' of the next. With
        g = gcd(r, r'), the microbatches of one residue class modulo g meet all pairs of that
        class's replicas equally often.
        """
        key = (sender, receiver)
        if key not in self._crossings:
            sends, receives = sum(sender), sum(receiver)
            g = math.gcd(sends, receives)
            scale = g / (sends * receives)
            result = []
            for link in self.shared:
                up = down = 0
                for inside_before, inside_after in zip(self._inside(sender, link, g), self._inside(receiver, link, g), strict=True):
                    up += inside_before * (receives // g - inside_after)
                    down += (sends // g - inside_before) * inside_after
                result.append((up * scale, down * scale))
            self._crossings[key] = tuple(result)
        return self._crossings[key]

    def _inside(self, allocation: Allocation, link: SharedLink, classes: int) -> list[int]:
        """Of each residue class, the replicas below a link."""
        if classes == 1:  # the order does not matter
            return [sum(allocation[p] for p in link.below)]
        order = self.order(allocation)
        return [sum(p in link.below for p in order[residue::classes]) for residue in range(classes)]

    def crossing_us_per_byte(self, sender: Allocation, receiver: Allocation) -> frozenset[tuple[float, float]]:
        """The distinct times that a byte sent to the receiver, and one sent back, add to a shared link's upward direction."""
        key = (self.pattern(sender), self.pattern(receiver))
        if key not in self._crossing_us:
            self._crossing_us[key] = frozenset(
                (up / link.link.bandwidth_bytes_per_s * 1e6, down / link.link.bandwidth_bytes_per_s * 1e6)
                for link, (up, down) in zip(self.shared, self.crossings(*key), strict=True) if up or down)
        return self._crossing_us[key]

    def least_crossings(self, sender: Allocation, receiver: Allocation) -> tuple[tuple[float, float], ...]:
        """Like :meth:`crossings` for the best order there could be: as much stays inside as both have there."""
        result = []
        for link in self.shared:
            before = sum(sender[p] for p in link.below) / sum(sender)
            after = sum(receiver[p] for p in link.below) / sum(receiver)
            result.append((max(before - after, 0.0), max(after - before, 0.0)))
        return tuple(result)
