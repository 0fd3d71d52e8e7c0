"""The objective of "Efficient Algorithms for Device Placement of DNN Graph Operators" (NeurIPS 2020), solved exactly.

The load of an accelerator is the latency of its operators, and the time to move each distinct tensor it
takes in and each of its own tensors that somebody else needs, once each. A processor has the tensors at
hand: its load is the latency of its operators there. Forward and backward operators of a colour are
together, the forward part is contiguous and the backward part its mirror: a plan is a path of cut states of
the graph of :meth:`planner.imports.dnn_partitioning.Placement.groups`, with at most as many stages as there
are accelerators and processors. The largest load is minimised.

With n cut states, state i after c processors is number ``c n + i`` of a path, so that one number of units,
the accelerators, is left to count::

    no processor yet   0 -- a stage on an accelerator, 1 unit -->  i  ...        n-1
                             \\ a stage on a processor, 0 units                   |  nothing more to do
    one processor      n     --------------------------------> n+i ...   --->   2n-1
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.imports.dnn_partitioning import Placement
from planner.model.ideals import CutStates, enumerate_ideals, predecessor_masks
from planner.published.bottleneck import EQUAL, Bottleneck, least_time
from planner.published.state_paths import IMPOSSIBLE
from planner.spec.errors import Infeasible

__all__ = ["Placed", "cpu_load", "load", "place"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_MOST_STATES = 6000  # pairs of them are enumerated
_QUICK_STATES = 60
_AT_ONCE = 50_000  # stages whose operators are held in memory


@dataclass(frozen=True)
class Placed:
    """The operators of each accelerator and processor, the largest load, and one that no contiguous plan is below."""

    accelerators: tuple[tuple[int, ...], ...]
    cpus: tuple[tuple[int, ...], ...]
    largest_load: float
    bound: float


@dataclass(frozen=True, eq=False)
class _Loads:
    """Steps of a path, sorted by ``last``, their loads and how many accelerators they take."""

    state_count: int
    first: Ints
    last: Ints
    load: Floats
    accelerators: Ints

    def some(self, chosen: Ints) -> _Loads:
        return _Loads(self.state_count, self.first[chosen], self.last[chosen], self.load[chosen], self.accelerators[chosen])

    def cost_us(self, units: Ints | int) -> Floats:
        return self.load + 0.0 * np.asarray(units)

    def units(self, time_us: float, most: int) -> Ints:
        return np.where(self.load <= time_us, self.accelerators, IMPOSSIBLE)


def place(placement: Placement) -> Placed:
    """The contiguous plan with the smallest largest load, proven.

    Raises:
        Infeasible: no contiguous plan fits the accelerators, or the graph has too many cut states to try all.
    """
    groups = placement.groups()
    of = {index: number for number, members in enumerate(groups) for index in members}
    edges = {(min(of[a], of[b]), max(of[a], of[b])) for a, b in _ordering(placement) if of[a] != of[b]}
    ideals = enumerate_ideals(predecessor_masks(len(groups), sorted(edges)), _MOST_STATES)
    if ideals is None:
        raise Infeasible(f"the {len(groups)} groups of operators have more than {_MOST_STATES} cut states", code="too_many_states",
                         hint="import the file as a profile, and plan that")
    states = CutStates(len(groups), tuple(ideals), complete=True)
    found = _solve(placement, groups, states)
    if found is None:
        raise Infeasible(f"no contiguous plan fits {placement.accelerators} accelerators of {placement.accelerator_bytes:g} bytes",
                         hint="give more accelerators, or accelerators with more memory")
    accelerators: list[tuple[int, ...]] = []
    cpus: list[tuple[int, ...]] = []
    for step in found.steps:
        members = [i for g in states.layers(step.first % len(states), step.last % len(states)) for i in groups[g]]
        if members:
            (accelerators if step.units else cpus).append(tuple(sorted(members)))
    loads = [load(placement, members) for members in accelerators] + [cpu_load(placement, members) for members in cpus]
    return Placed(tuple(accelerators), tuple(cpus), max(loads), found.bound_us)


def _solve(placement: Placement, groups: Sequence[Sequence[int]], states: CutStates) -> Bottleneck | None:
    """A plan over a few of the states, if there is one, bounds what is worth knowing of all."""
    ceiling = np.inf
    if len(states) > 2 * _QUICK_STATES:
        size = sum(row * float(len(members)) for row, members in zip(states.holds(), groups, strict=True))
        few = CutStates(states.layer_count, tuple(states.masks[i] for i in states.some(np.asarray(size), _QUICK_STATES)), complete=False)
        quick = _solve(placement, groups, few)
        ceiling = np.inf if quick is None else quick.time_us * (1 + EQUAL)
    end = len(states) * (placement.cpus + 1) - 1
    return least_time(_loads(placement, groups, states, ceiling), 0, end, placement.accelerators, 1)


def _ordering(placement: Placement) -> list[tuple[int, int]]:
    """The edges that order stages: not those from the forward to the backward part, which joins any stages."""
    return [(a, b) for a, b in placement.edges if placement.operators[a].backward == placement.operators[b].backward]


def _loads(placement: Placement, groups: Sequence[Sequence[int]], states: CutStates, ceiling: float) -> _Loads:
    """The steps whose load may be at most ``ceiling``."""
    holds = states.holds()
    last, first = np.nonzero(states.inside().T)
    operators = placement.operators
    latency, memory, on_cpu = np.zeros(len(states)), np.zeros(len(states)), np.zeros(len(states))
    for row, members in zip(holds, groups, strict=True):
        latency += row * sum(operators[i].latency for i in members)
        memory += row * sum(operators[i].memory_bytes for i in members)
        on_cpu += row * sum(operators[i].cpu_latency for i in members)
    quick = on_cpu[last] - on_cpu[first] <= ceiling
    cpu = (first[quick], last[quick], on_cpu[last[quick]] - on_cpu[first[quick]])
    fits = (memory[last] - memory[first] <= placement.accelerator_bytes) & (latency[last] - latency[first] <= ceiling)
    first, last = first[fits], last[fits]
    total = latency[last] - latency[first]
    tensors = _tensors(placement, groups)
    costs = np.array(list(tensors.values()))
    for start in range(0, len(total), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        mine = holds[:, last[part]] & ~holds[:, first[part]]  # groups by stages
        pays = np.array([_pays(mine, source, targets) for source, targets in tensors])
        total[part] += costs @ pays if tensors else 0.0
    return _with_cpus(len(states), placement.cpus, (first, last, total), cpu)


def _pays(mine: Bools, source: int, targets: tuple[int, ...]) -> Bools:
    """Of stages whose groups are ``mine``: which take the tensor in, or make it for somebody else."""
    if len(targets) == 1:
        only: Bools = mine[source] ^ mine[targets[0]]
        return only
    users = mine[list(targets)]
    return np.where(mine[source], ~users.all(axis=0), users.any(axis=0))


def _with_cpus(n: int, cpus: int, on_accelerator: tuple[Ints, Ints, Floats], on_cpu: tuple[Ints, Ints, Floats]) -> _Loads:
    """The steps between the states of every number of processors used so far."""
    parts = []
    for used in range(cpus + 1):
        first, last, total = on_accelerator
        parts.append((first + used * n, last + used * n, total, np.ones_like(first)))
        if used < cpus:
            first, last, total = on_cpu
            parts.append((first + used * n, last + (used + 1) * n, total, np.zeros_like(first)))
            end = np.array([(used + 1) * n - 1])
            parts.append((end, end + n, np.zeros(1), np.zeros_like(end)))
    first, last, total, units = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    order = np.argsort(last, kind="stable")
    return _Loads(n * (cpus + 1), first[order], last[order], total[order], units[order])


def _tensors(placement: Placement, groups: Sequence[Sequence[int]]) -> dict[tuple[int, tuple[int, ...]], float]:
    """What it costs to move the tensors that a group makes for exactly these other groups."""
    of = {index: number for number, members in enumerate(groups) for index in members}
    targets: dict[int, set[int]] = defaultdict(set)
    for source, target in placement.edges:
        if of[source] != of[target]:
            targets[source].add(of[target])
    costs: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
    for source, users in targets.items():
        costs[of[source], tuple(sorted(users))] += placement.operators[source].transfer_cost
    return costs


def load(placement: Placement, members: Sequence[int]) -> float:
    """The load of an accelerator that has these operators, by its definition."""
    own, operators = set(members), placement.operators
    taken_in = {source for source, target in placement.edges if target in own and source not in own}
    given_out = {source for source, target in placement.edges if source in own and target not in own}
    return sum(operators[i].latency for i in own) + sum(operators[i].transfer_cost for i in taken_in | given_out)


def cpu_load(placement: Placement, members: Sequence[int]) -> float:
    """The load of a processor that has these operators."""
    return sum(placement.operators[i].cpu_latency for i in members)
