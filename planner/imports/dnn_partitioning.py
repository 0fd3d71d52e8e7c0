"""Inputs of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020).

JSON with ``maxFPGAs`` accelerators of ``maxSizePerFPGA`` bytes, ``maxCPUs``, ``nodes`` (``id``, ``fpgaLatency``,
``cpuLatency``, ``size``, ``isBackwardNode``, ``colorClass``) and ``edges`` (``sourceId``, ``destId``,
``cost``: the time to move the source's output between accelerator and host memory). Nodes of one
colour class share a device: a forward node and its backward. A node without a class is alone in one.

:class:`Placement` is the input as it stands. :func:`profile_of` makes a profile of it, in which a
colour class is one layer, and latencies are milliseconds.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from planner.imports.graph import execution_order, imported_layer, imported_profile, natural, outputs, read_text
from planner.spec.errors import InvalidFile
from planner.spec.profile import Profile

__all__ = ["Operator", "Placement", "parse_dnn_partitioning", "profile_of", "read_dnn_partitioning"]

_FORM = "dnn-partitioning"
_LARGEST = 1e15


@dataclass(frozen=True)
class Operator:
    """A node. ``transfer_cost`` is the time to move its output, in the unit of the latencies; 0 when nobody uses it."""

    name: str
    latency: float  # on an accelerator
    cpu_latency: float
    memory_bytes: float
    output_bytes: float
    transfer_cost: float
    backward: bool
    color: int  # operators of one colour share a device


@dataclass(frozen=True)
class Placement:
    """Operators to be placed on at most ``accelerators`` accelerators of ``accelerator_bytes`` each, and ``cpus`` processors."""

    model: str
    text: str  # the file, for the profile's fingerprint
    accelerators: int
    accelerator_bytes: float
    cpus: int
    operators: tuple[Operator, ...]
    edges: tuple[tuple[int, int], ...]  # indices of operators, ascending

    def colors(self) -> list[list[int]]:
        """Operators that share a device, by colour, in the order of their first operator."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, operator in enumerate(self.operators):
            groups[operator.color].append(index)
        return list(groups.values())

    def groups(self) -> list[list[int]]:
        """Sets of operators that one stage must hold, in an order in which stages may follow each other.

        A forward edge says that its target's stage is not before its source's, an edge between backward
        operators that it is not after it: backward runs through the stages from the last to the first.
        Colours that these rules put on a circle belong together. Some published files write the backward
        edges in the direction of the forward ones; they are then read so.
        """
        colors = self.colors()
        of = {index: color for color, members in enumerate(colors) for index in members}
        ways: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for source, target in self.edges:
            backward = self.operators[source].backward
            if backward == self.operators[target].backward and of[source] != of[target]:
                ways[backward].append((of[source], of[target]))
        along = set(ways[False])
        mirrored = sum((a, b) in along for a, b in ways[True]) <= sum((b, a) in along for a, b in ways[True])
        order: nx.DiGraph = nx.DiGraph()
        order.add_nodes_from(range(len(colors)))
        order.add_edges_from(ways[False])
        order.add_edges_from(((b, a) if mirrored else (a, b)) for a, b in ways[True])
        whole = nx.condensation(order)
        members = {part: sorted(i for color in data["members"] for i in colors[color]) for part, data in whole.nodes.items()}
        parts = sorted(whole, key=lambda part: members[part][0])
        in_order = execution_order(parts, list(whole.edges))
        return [members[part] for part in in_order or parts]


def read_dnn_partitioning(path: Path) -> Placement:
    """Read the file; see :func:`parse_dnn_partitioning`."""
    return parse_dnn_partitioning(read_text(path, _FORM), source=str(path), model=path.stem)


def parse_dnn_partitioning(text: str, *, source: str, model: str) -> Placement:
    """The input in ``text``, which was read from ``source``.

    Raises:
        InvalidFile: with the place, for a missing or malformed value, an identifier that is there twice, an
            edge to an unknown node, edges of one node with different costs, a cycle, or when there is no node.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{source} is not JSON: {error}", f"give a {_FORM} file") from error
    reader = _Reader(source)
    nodes, edges = reader.items(data, "nodes"), reader.items(data, "edges")
    if not nodes:
        raise _invalid(f"{source}: nodes is empty", "give a model with nodes")
    index: dict[int, int] = {}
    for position, node in enumerate(nodes):
        identifier = reader.whole(node, "id", f"nodes[{position}]")
        if identifier in index:
            raise _invalid(f"{source}: nodes[{position}].id {identifier} is that of nodes[{index[identifier]}] too", "give each its own")
        index[identifier] = position
    pairs, costs, sizes = _edges(reader, edges, index)
    operators = tuple(_operator(reader, node, position, costs, sizes) for position, node in enumerate(nodes))
    if execution_order(range(len(nodes)), pairs) is None:
        cycle = " -> ".join(nodes[source_index].get("name", str(source_index)) for source_index, _ in nx.find_cycle(nx.DiGraph(pairs))[:6])
        raise _invalid(f"{source}: the edges form a cycle: {cycle}", "remove one of its edges")
    accelerators = reader.whole(data, "maxFPGAs", "")
    if accelerators < 1:
        raise _invalid(f"{source}: maxFPGAs is {accelerators}, below 1", "give at least one accelerator")
    return Placement(model, text, accelerators, reader.number(data, "maxSizePerFPGA", ""), reader.whole(data, "maxCPUs", ""), operators,
                     tuple(sorted(pairs)))


def _edges(reader: _Reader, edges: list[Any], index: dict[int, int]) -> tuple[list[tuple[int, int]], dict[int, float], dict[int, float]]:
    """Pairs of positions, and by source the cost and the bytes of its output."""
    pairs: dict[tuple[int, int], None] = {}
    costs: dict[int, float] = {}
    sizes: dict[int, float] = {}
    for number, edge in enumerate(edges):
        where = f"edges[{number}]"
        ends = [reader.whole(edge, key, where) for key in ("sourceId", "destId")]
        for end in ends:
            if end not in index:
                raise _invalid(f"{reader.source}: {where} names node {end}, which is not in nodes", "remove the edge or add the node")
        source, target = index[ends[0]], index[ends[1]]
        if source == target:
            raise _invalid(f"{reader.source}: {where} joins node {ends[0]} to itself", "remove the edge")
        cost = reader.number(edge, "cost", where)
        if costs.setdefault(source, cost) != cost:
            raise _invalid(f"{reader.source}: {where}.cost is {cost:g}, another edge of node {ends[0]} has {costs[source]:g}",
                           "all edges of one node carry the same output: give them one cost")
        sizes[source] = max(sizes.get(source, 0.0), reader.number(edge, "size", where) if "size" in edge else 0.0)
        pairs[source, target] = None
    return list(pairs), costs, sizes


def _operator(reader: _Reader, node: Any, position: int, costs: dict[int, float], sizes: dict[int, float]) -> Operator:
    where = f"nodes[{position}]"
    alone = -1 - position  # colour classes of the file are not negative
    return Operator(
        name=str(node.get("name", node["id"])),
        latency=reader.number(node, "fpgaLatency", where),
        cpu_latency=reader.number(node, "cpuLatency", where),
        memory_bytes=reader.number(node, "size", where),
        output_bytes=sizes.get(position, 0.0),
        transfer_cost=costs.get(position, 0.0),
        backward=bool(reader.whole(node, "isBackwardNode", where)),
        color=reader.whole(node, "colorClass", where) if "colorClass" in node else alone,
    )


class _Reader:
    """Values at named places of the file."""

    def __init__(self, source: str) -> None:
        self.source = source

    def items(self, data: Any, key: str) -> list[Any]:
        if not isinstance(data, dict) or not isinstance(data.get(key), list):
            raise _invalid(f"{self.source} has no list {key!r}", f"give a {_FORM} file")
        for number, item in enumerate(data[key]):
            if not isinstance(item, dict):
                raise _invalid(f"{self.source}: {key}[{number}] is {item!r}, not an object", f"give a {_FORM} file")
        return data[key]  # type: ignore[no-any-return]

    def number(self, data: dict[str, Any], key: str, where: str) -> float:
        value = data.get(key)
        if not isinstance(value, int | float) or not 0 <= value < _LARGEST or math.isnan(value):
            raise self._wrong(key, where, value, f"a number from 0 to {_LARGEST:g}")
        return float(value)

    def whole(self, data: dict[str, Any], key: str, where: str) -> int:
        value = data.get(key)
        if not isinstance(value, int) or not 0 <= value < _LARGEST:
            raise self._wrong(key, where, value, "a whole number from 0")
        return int(value)

    def _wrong(self, key: str, where: str, value: Any, expected: str) -> InvalidFile:
        place = f"{where}.{key}" if where else key
        found = "missing" if value is None else f"{value!r}, not {expected}"
        return _invalid(f"{self.source}: {place} is {found}", "correct the value")


def profile_of(placement: Placement, *, command: str, microbatch_size: int = 1) -> Profile:
    """The model as a profile: a layer for each set of operators that one stage must hold.

    What crosses between layers is each layer's forward output, once, and the gradients of it: the outputs
    of the backward operators that run towards it.
    """
    operators, groups = placement.operators, placement.groups()
    of = {index: number for number, members in enumerate(groups) for index in members}
    forward: dict[int, set[int]] = defaultdict(set)
    gradient: dict[int, set[int]] = defaultdict(set)
    edges: set[tuple[int, int]] = set()
    for source, target in placement.edges:
        here, there = sorted((of[source], of[target]))
        if here == there:
            continue
        edges.add((here, there))
        (gradient if operators[source].backward or of[source] > of[target] else forward)[here].add(source)
    layers = []
    for members in groups:
        named = min(members, key=lambda i: (operators[i].backward, natural(operators[i].name)))
        ahead = [operators[i] for i in members if not operators[i].backward]
        back = [operators[i] for i in members if operators[i].backward]
        saved = round(sum(operator.output_bytes for operator in ahead))
        layers.append(imported_layer(
            operators[named].name, 1000 * sum(operator.latency for operator in ahead), 1000 * sum(operator.latency for operator in back),
            max(0, round(sum(operator.memory_bytes for operator in ahead)) - saved), saved))
    numbers = range(len(groups))
    moved = [{number: round(sum(operators[i].output_bytes for i in way[number])) for number in numbers} for way in (forward, gradient)]
    return imported_profile(model=placement.model, form=_FORM, text=placement.text, command=command, microbatch_size=microbatch_size,
                            layers=layers, tensors=outputs(numbers, sorted(edges), *moved))


def _invalid(message: str, hint: str) -> InvalidFile:
    return InvalidFile(message, hint=hint)
