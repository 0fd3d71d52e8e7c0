"""The hardware as a tree: devices hang on servers, servers on switches, each on one full-duplex link.

Equal subtrees are counted, not repeated. A device's name is its path, such as ``server1/device3``.
The link of a node joins it to its parent, and everything that enters or leaves the node uses it: a
server's link is the network card its devices share.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from planner.spec.errors import InvalidValue, shown
from planner.spec.files import require

__all__ = ["Cluster", "DeviceType", "Link", "Node"]


@dataclass(frozen=True)
class Link:
    """A full-duplex link: ``bandwidth_bytes_per_s`` in each direction."""

    bandwidth_bytes_per_s: float
    latency_us: float

    def __post_init__(self) -> None:
        require(0 < self.bandwidth_bytes_per_s < 1e18, f"bandwidth_bytes_per_s {self.bandwidth_bytes_per_s} is not between 0 and 1e18")
        require(0 <= self.latency_us < 1e12, f"latency_us {self.latency_us} is not between 0 and 1e12")


@dataclass(frozen=True)
class DeviceType:
    """``speed`` is relative to the profiled device; ``memory_bytes`` None means no limit is known."""

    name: str
    speed: float
    memory_bytes: int | None

    def __post_init__(self) -> None:
        require(bool(self.name), "name is empty")
        require(0 < self.speed < 1e9, f"speed {self.speed} is not between 0 and 1e9")
        require(self.memory_bytes is None or 1 <= self.memory_bytes < 1e18, f"memory_bytes {self.memory_bytes} is not between 1 and 1e18")


@dataclass(frozen=True)
class Node:
    """``count`` equal nodes under one parent: devices (``device`` set) or groups (``children`` set)."""

    name: str
    count: int
    link: Link  # to the parent
    device: str | None  # name of the device type, for a leaf
    children: tuple[Node, ...]

    def __post_init__(self) -> None:
        require(bool(self.name) and "/" not in self.name, f"name {self.name!r} is empty or has a '/'")
        require(1 <= self.count <= 1_000_000, f"count {shown(self.count)} is not between 1 and 1000000")
        require((self.device is None) == bool(self.children), f"node {self.name!r} must have either a device type or children")

    @property
    def devices_each(self) -> int:
        """Devices in one of the ``count`` copies."""
        return 1 if self.device is not None else sum(child.count * child.devices_each for child in self.children)


@dataclass(frozen=True)
class Cluster:
    """All the hardware a plan may use."""

    FORMAT: ClassVar[str] = "pipedream-cluster"
    VERSION: ClassVar[int] = 1

    name: str
    device_types: tuple[DeviceType, ...]
    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        names = [kind.name for kind in self.device_types]
        require(len(set(names)) == len(names), f"device types {names} have a name twice")
        require(bool(self.nodes), "nodes is empty: the cluster has no device")
        require(self.device_count <= 1_000_000, f"the cluster has {self.device_count} devices, more than 1000000")
        for _, siblings in _groups("", self.nodes):
            titles = [node.name for node in siblings]
            require(len(set(titles)) == len(titles), f"sibling nodes {titles} have a name twice")
            for node in siblings:
                for other in siblings:
                    require(not _paths_meet(node, other), f"{node.count} nodes called {node.name!r} and their sibling {other.name!r} "
                            "would have a name in common", hint="give one of them another name")
                require(node.device is None or node.device in names, f"node {node.name!r} has device type {node.device!r}, known: {names}")

    @property
    def device_count(self) -> int:
        return sum(node.count * node.devices_each for node in self.nodes)

    def device_type(self, name: str) -> DeviceType:
        """The type called ``name``; :class:`InvalidValue` when there is none."""
        for kind in self.device_types:
            if kind.name == name:
                return kind
        raise InvalidValue(f"device type {name!r} is not in the cluster {self.name!r}")

    def devices(self) -> Iterator[tuple[str, DeviceType]]:
        """Every device's path and type, in tree order: the devices of one server stand together."""
        kinds = {kind.name: kind for kind in self.device_types}

        def walk(prefix: str, nodes: tuple[Node, ...]) -> Iterator[tuple[str, DeviceType]]:
            for node in nodes:
                for index in range(node.count):
                    path = f"{prefix}{node.name}{index}"
                    if node.device is not None:
                        yield path, kinds[node.device]
                    else:
                        yield from walk(f"{path}/", node.children)

        return walk("", self.nodes)


def _paths_meet(node: Node, other: Node) -> bool:
    """Whether the first of ``other`` (``d1`` and 0) has the name of one of ``node`` (``d`` and 10)."""
    rest = other.name[len(node.name):]
    if not other.name.startswith(node.name) or not (rest.isascii() and rest.isdigit()) or rest.startswith("0") or len(rest) > 7:
        return False
    return int(f"{rest}0") < node.count


def _groups(prefix: str, nodes: tuple[Node, ...]) -> Iterator[tuple[str, tuple[Node, ...]]]:
    yield prefix, nodes
    for node in nodes:
        yield from _groups(f"{prefix}{node.name}/", node.children)
