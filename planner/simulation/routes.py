"""Which links a transfer uses: up from the sender to the lowest common switch, then down to the receiver.

Each link is two *directions*, as it is full duplex::

    server0/device1 -> server1/device0:   server0/device1 up, server0 up, server1 down, server1/device0 down

An all-reduce ring visits its devices in tree order, so it crosses each link between them once in each
direction (:class:`planner.hardware.topology.Ring`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.spec.cluster import Cluster, Link, Node

__all__ = ["Direction", "Route", "Routes"]


class Direction(NamedTuple):
    """One way of the link above ``node``."""

    node: str
    way: str  # "up" or "down"
    bytes_per_us: float

    @property
    def name(self) -> str:
        return f"{self.node} {self.way}"


class Route(NamedTuple):
    """Indices into :attr:`Routes.directions`, and the time the first byte takes."""

    directions: tuple[int, ...]
    latency_us: float


class Routes:
    """Routes between the given devices of a cluster."""

    def __init__(self, cluster: Cluster, devices: Iterable[str]) -> None:
        wanted = {above for device in devices for above in _ancestors(device)}
        self._index: dict[str, int] = {}
        self._links: list[Link] = []
        self.directions: list[Direction] = []
        self._tree_order: dict[str, int] = {}
        self._walk("", cluster.nodes, wanted)

    def _walk(self, prefix: str, nodes: tuple[Node, ...], wanted: set[str]) -> None:
        for node in nodes:
            for index in range(node.count):
                path = f"{prefix}{node.name}{index}"
                if path not in wanted:
                    continue
                rate = node.link.bandwidth_bytes_per_s / 1e6
                self._index[path] = len(self.directions)
                self._links.append(node.link)
                self.directions += [Direction(path, "up", rate), Direction(path, "down", rate)]
                self._tree_order[path] = len(self._tree_order)
                self._walk(f"{path}/", node.children, wanted)

    def path(self, sender: str, receiver: str) -> Route:
        """From one device to another."""
        ups, downs = _ancestors(sender), _ancestors(receiver)
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ups, downs, strict=False)))
        up = [self._index[node] for node in reversed(ups[common:])]
        down = [self._index[node] + 1 for node in downs[common:]]
        return Route((*up, *down), sum(self._links[direction // 2].latency_us for direction in (*up, *down)))

    def ring(self, devices: Sequence[str]) -> Route:
        """Every direction that an all-reduce over ``devices`` uses; ``2 (r-1)`` times the longest hop's latency."""
        order = sorted(devices, key=self._tree_order.__getitem__)
        hops = [self.path(before, after) for before, after in zip(order, [*order[1:], order[0]], strict=True)]
        used = dict.fromkeys(direction for hop in hops for direction in hop.directions)
        return Route(tuple(used), 2 * (len(order) - 1) * max(hop.latency_us for hop in hops))


def _ancestors(device: str) -> list[str]:
    """The nodes whose links lead down to a device, itself the last.

    >>> _ancestors("rack0/server1/device2")
    ['rack0', 'rack0/server1', 'rack0/server1/device2']
    """
    return list(itertools.accumulate(device.split("/"), lambda above, name: f"{above}/{name}"))
