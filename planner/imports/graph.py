"""From nodes and edges in any order to layers in execution order: what every format needs.

Of the orders that respect the edges, the one is taken whose next layer is always the one that the
file numbers lowest, so that equal graphs give equal profiles however their lines are sorted.
"""

from __future__ import annotations

import hashlib
import heapq
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import networkx as nx

from planner.spec.errors import InvalidFile
from planner.spec.profile import Device, Layer, Profile, Tensor

__all__ = ["execution_order", "imported_layer", "imported_profile", "natural", "outputs", "read_text", "short_cycle"]

N = TypeVar("N", bound=Hashable)
_MOST_NAMED = 6  # nodes of a cycle that an error names


def read_text(path: Path, form: str) -> str:
    """The file's text.

    Raises:
        InvalidFile: it cannot be read.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise InvalidFile(f"cannot read {path}: {reason}", hint=f"give the path of a {form} file") from error


def natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A key by which ``node10`` comes after ``node9``.

    >>> sorted(["node10", "node9", "a"], key=natural)
    ['a', 'node9', 'node10']
    """
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"([0-9]+)", text) if part)


def execution_order(nodes: Sequence[N], edges: Iterable[tuple[N, N]]) -> list[N] | None:
    """``nodes`` in an order that respects ``edges``, those that stand first in ``nodes`` as early as possible; None for a cycle."""
    position = {node: index for index, node in enumerate(nodes)}
    waits, after = dict.fromkeys(nodes, 0), defaultdict(list)
    for source, target in edges:
        after[source].append(target)
        waits[target] += 1
    ready = [index for index, node in enumerate(nodes) if not waits[node]]
    order: list[N] = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        order.append(node)
        for target in after[node]:
            waits[target] -= 1
            if not waits[target]:
                heapq.heappush(ready, position[target])
    return order if len(order) == len(nodes) else None


def short_cycle(edges: Iterable[tuple[N, N]]) -> str:
    """A cycle in words: ``a -> b -> a``."""
    cycle = [source for source, _ in nx.find_cycle(nx.DiGraph(edges))]
    shown = [*cycle[:_MOST_NAMED], "..."] if len(cycle) > _MOST_NAMED else cycle
    return " -> ".join(map(str, [*shown, cycle[0]]))


def outputs(order: Sequence[N], edges: Iterable[tuple[N, N]], forward_bytes: Mapping[N, int], gradient_bytes: Mapping[N, int]
            ) -> tuple[Tensor, ...]:
    """One tensor for each node that others use: its output, with all its consumers."""
    index = {node: position for position, node in enumerate(order)}
    consumers: dict[N, set[int]] = defaultdict(set)
    for source, target in edges:
        consumers[source].add(index[target])
    return tuple(
        Tensor(f"output{position}", position, tuple(sorted(consumers[node])), forward_bytes[node], gradient_bytes[node])
        for position, node in enumerate(order) if consumers[node]
    )


def imported_layer(name: str, forward_us: float, backward_us: float, parameter_bytes: int, saved_bytes: int) -> Layer:
    """A layer of which only this is known: updates cost nothing, and no optimizer state is held."""
    return Layer(name=name, forward_us=forward_us, backward_us=backward_us, forward_spread_us=0.0, backward_spread_us=0.0,
                 update_us=0.0, copy_us=0.0, parameter_bytes=parameter_bytes, buffer_bytes=0, optimizer_bytes=0,
                 saved_bytes=saved_bytes, workspace_bytes=0, reads=())


def imported_profile(*, model: str, form: str, text: str, command: str, microbatch_size: int, layers: Sequence[Layer],
                     tensors: Sequence[Tensor]) -> Profile:
    """A profile without a job, on a device of which nothing is known; ``estimated``, as not all of it was measured."""
    device = Device(kind="unknown", name="unknown device", count=1, threads=1, memory_bytes=10**15,
                    link_bandwidth_bytes_per_s=1e9, link_latency_us=0.0)
    fingerprint = f"{form}:{hashlib.sha256(text.encode()).hexdigest()}"
    return Profile(model=model, job=None, command=command, fingerprint=fingerprint, device=device, microbatch_size=microbatch_size,
                   estimated=True, measured=None, layers=tuple(layers), tensors=tuple(tensors), tied=())
