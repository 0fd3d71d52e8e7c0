"""The original PipeDream's profile: one node a line, then its edges, each after a tab. ::

    node2 -- Conv2d(3, 64) -- forward_compute_time=4.2, backward_compute_time=7.9, activation_size=822083584.0, parameter_size=6912.0
    <tab>node2 -- node3

Times are milliseconds, sizes bytes, for one microbatch; a size may be a list ``[a; b]`` of several
outputs, which are added. As in the original, sources described ``Input...`` are the data and are
removed, and then the sinks described ``__getitem__...``, whose value nobody uses.

What a profile also asks for is assumed: a layer saves its output for backward, a gradient is as large
as the tensor it belongs to, and an update costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from planner.imports.graph import execution_order, imported_layer, imported_profile, natural, outputs, read_text, short_cycle
from planner.spec.errors import InvalidFile
from planner.spec.profile import Profile

__all__ = ["parse_pipedream_graph", "read_pipedream_graph"]

_FORM = "pipedream-graph"
_FIELDS = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
_LARGEST = 1e15  # milliseconds or bytes: what a profile can hold, and above anything real


@dataclass(frozen=True)
class _Node:
    name: str
    description: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float

    @property
    def title(self) -> str:
        """``node2:Conv2d``: unique, and short enough to type."""
        return f"{self.name}:{self.description.partition('(')[0].strip()}".rstrip(":")


def read_pipedream_graph(path: Path, *, command: str, microbatch_size: int = 1) -> Profile:
    """Read the file; see :func:`parse_pipedream_graph`."""
    text = read_text(path, _FORM)
    return parse_pipedream_graph(text, source=str(path), model=path.stem, command=command, microbatch_size=microbatch_size)


def parse_pipedream_graph(text: str, *, source: str, model: str, command: str, microbatch_size: int = 1) -> Profile:
    """The profile in ``text``, which was read from ``source``.

    Raises:
        InvalidFile: with the line, for a malformed line, a value that is no finite number from 0, a node
            or an edge that is there twice, an edge to an unknown node, a cycle, or when no layer is left.
    """
    nodes: dict[str, _Node] = {}
    edge_lines: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        where = f"{source}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            edge = _edge(line, where)
            if edge in edge_lines:
                raise _invalid(f"{where}: the edge {edge[0]} -- {edge[1]} is on line {edge_lines[edge]} too", "keep one of them")
            edge_lines[edge] = number
            continue
        node = _node(line, where)
        if node.name in nodes:
            raise _invalid(f"{where}: the node {node.name} was described before", "give every node one line")
        nodes[node.name] = node
    for (begin, end), number in edge_lines.items():
        for name in (begin, end):
            if name not in nodes:
                raise _invalid(f"{source}:{number}: the edge {begin} -- {end} names {name}, which no line describes",
                               f"describe {name} on a line of its own, or remove the edge")
    kept, edges = _clean(nodes, edge_lines)
    if not kept:
        raise _invalid(f"{source} has no layer: {len(nodes)} nodes, all of them data or unused values", "give a profile with layers")
    order = execution_order(kept, edges)
    if order is None:
        raise _invalid(f"{source}: the edges form a cycle: {short_cycle(edges)}", "remove one of its edges")
    activation = {name: round(nodes[name].activation_bytes) for name in order}
    layers = [
        imported_layer(node.title, node.forward_ms * 1000, node.backward_ms * 1000, round(node.parameter_bytes), activation[node.name])
        for node in (nodes[name] for name in order)
    ]
    return imported_profile(model=model, form=_FORM, text=text, command=command, microbatch_size=microbatch_size, layers=layers,
                            tensors=outputs(order, edges, activation, activation))


def _clean(nodes: dict[str, _Node], edges: dict[tuple[str, str], int]) -> tuple[list[str], list[tuple[str, str]]]:
    """Without the data and without unused values: node names in natural order, and edges."""
    fed = {end for _, end in edges}
    gone = {name for name, node in nodes.items() if node.description.startswith("Input") and name not in fed}
    used = {begin for begin, _ in edges}
    gone |= {name for name, node in nodes.items() if node.description.startswith("__getitem__") and name not in used}
    return (sorted((name for name in nodes if name not in gone), key=natural),
            [edge for edge in edges if edge[0] not in gone and edge[1] not in gone])


def _edge(line: str, where: str) -> tuple[str, str]:
    parts = [part.strip() for part in line.strip().split("--")]
    if len(parts) != 2 or not all(parts):
        raise _invalid(f"{where}: {_shown(line)} is not an edge 'node1 -- node2'", "an edge is a tab and two node names with -- between")
    if parts[0] == parts[1]:
        raise _invalid(f"{where}: the edge {parts[0]} -- {parts[1]} joins a node to itself", "remove the edge")
    return parts[0], parts[1]


def _node(line: str, where: str) -> _Node:
    parts = line.strip().split(" -- ")
    at = next((index for index, part in enumerate(parts) if part.lstrip().startswith(f"{_FIELDS[0]}=")), 0)
    if at < 2 or not parts[0].strip():
        raise _invalid(f"{where}: {_shown(line)} is not a node", f"a node is 'node1 -- description -- {_FIELDS[0]}=..., ...'")
    values: dict[str, float] = {}
    for item in parts[at].split(","):
        key, equals, value = (word.strip() for word in item.partition("="))
        if not equals or key not in _FIELDS or key in values:
            problem = "twice" if key in values else "unknown"
            raise _invalid(f"{where}: {item.strip()!r} of {parts[0].strip()} is {problem}", f"the fields are {', '.join(_FIELDS)}")
        values[key] = _value(key, value, where)
    missing = [field for field in _FIELDS if field not in values]
    if missing:
        raise _invalid(f"{where}: {parts[0].strip()} has no {missing[0]}", f"the fields are {', '.join(_FIELDS)}")
    return _Node(parts[0].strip(), " -- ".join(parts[1:at]).strip(), *(values[field] for field in _FIELDS))


def _value(key: str, text: str, where: str) -> float:
    items = text[1:-1].split(";") if text.startswith("[") and text.endswith("]") and key == "activation_size" else [text]
    total = 0.0
    for item in items:
        try:
            number = float(item)
        except ValueError:
            number = math.nan
        if not 0 <= number < _LARGEST:
            raise _invalid(f"{where}: {key} is {text.strip()!r}, not a number from 0 to {_LARGEST:g}", "profile the model again")
        total += number
    return total


def _shown(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= 60 else text[:57] + "...")


def _invalid(message: str, hint: str) -> InvalidFile:
    return InvalidFile(message, hint=hint)
