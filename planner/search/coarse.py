"""A coarser path network, for hardware with too many places or plans for :mod:`planner.search.network`.

Nodes are cuts, or, when memory limits bind, (cut, devices after it): what runs after a stage decides
what it holds, so the limit removes arcs and needs no row. Capacities and loads are rows.

The load of a shared link depends on pairs of consecutive stages. Let I(a) be the share of a stage's
replicas below the link. Of the microbatches of a cut, the share that stays inside is a variable::

    inside <= I(stage that ends)      inside <= I(stage that begins)
    leaves = I(ends) - inside         enters = I(begins) - inside

which is exact for packed stages and for stages in equal proportions. Where the real pairing of two
allocations keeps less inside, :class:`Pairings` adds rows, and the program is solved again.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import pulp

from planner.cost import Stage, ring_bytes
from planner.hardware.topology import Allocation
from planner.search.columns import Candidate
from planner.search.network import Arc
from planner.search.problem import Problem, Scenario

__all__ = ["Pairings", "coarse_network", "inside_rows"]

Choice = tuple[Candidate, pulp.LpVariable]


@dataclass
class Pairings:
    """Allocations at a cut whose transfers, with some other allocation, stay inside less than the relaxation thought."""

    found: set[tuple[int, int, Allocation, bool]] = field(default_factory=set)  # cut, shared link, allocation, whether it receives

    def learn(self, problem: Problem, stages: tuple[Stage, ...]) -> bool:
        """Note the pairs of a plan; False when all were known."""
        known = len(self.found)
        for sender, receiver in itertools.pairwise(stages):
            for index, (leaves, enters) in enumerate(problem.topology.crossings(sender.allocation, receiver.allocation)):
                if min(leaves, enters) > 1e-12:  # the relaxation keeps min(I, I') inside, and one of the two at zero
                    self.found.add((sender.last, index, sender.allocation, False))
                    self.found.add((sender.last, index, receiver.allocation, True))
        return len(self.found) > known


def coarse_network(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate]) -> list[Arc]:
    """An arc for each candidate, or for each number of devices after it where that decides whether it fits."""
    n = problem.chain.end
    expanded = any(c.last < n and c.max_after < scenario.max_devices - c.replicas for c in candidates)
    reached: dict[int, set[int]] = defaultdict(set, {n: {0}})
    arcs: list[Arc] = []
    for c in sorted(candidates, key=lambda c: (-c.first, c.last, c.replicas, c.allocation)):
        for after in sorted(reached[c.last]):
            before = after + c.replicas if expanded else 0
            if after <= c.max_after and before <= scenario.max_devices:
                reached[c.first].add(before)
                arcs.append(Arc(c, (c.first, True, (before,), ()), (c.last, True, (after,), ()), ()))
    return arcs if reached[0] else []


def inside_rows(program: pulp.LpProblem, problem: Problem, scenario: Scenario, chosen: list[Choice], time_us: float,
                pairings: Pairings) -> list[list[tuple[pulp.LpVariable, float]]]:
    """Variables and rows for what stays inside; returns the load terms up and down each link, in units of what it carries in T."""
    loads = []
    for index, link in enumerate(problem.topology.shared):
        below = {c.allocation: sum(c.allocation[p] for p in link.below) / c.replicas for c, _ in chosen}
        mine = [(c, variable) for c, variable in chosen if below[c.allocation] > 0]
        unit = 1e6 / (link.link.bandwidth_bytes_per_s * time_us)
        up, down = _stage_terms(problem, scenario, mine, below, unit)
        ending: dict[int, list[Choice]] = defaultdict(list)
        beginning: dict[int, list[Choice]] = defaultdict(list)
        for c, variable in mine:
            ending[c.last].append((c, variable))
            beginning[c.first].append((c, variable))
        for cut in sorted(ending.keys() & beginning.keys()):
            stays = program.add_variable(f"inside_{index}_{cut}", 0, 1)
            crossing = -unit * (problem.chain.forward_bytes[cut] + problem.chain.gradient_bytes[cut])
            up.append((stays, crossing))
            down.append((stays, crossing))
            for side, group in (("ends", ending[cut]), ("begins", beginning[cut])):
                terms = [(variable, below[c.allocation]) for c, variable in group]
                program += stays <= pulp.LpAffineExpression(terms), f"inside_{index}_{cut}_{side}"
            _pairing_rows(program, problem, index, cut, stays, ending[cut], beginning[cut], pairings)
        loads += [up, down]
    return loads


def _stage_terms(problem: Problem, scenario: Scenario, chosen: list[Choice], below: dict[Allocation, float],
                 unit: float) -> tuple[list[tuple[pulp.LpVariable, float]], list[tuple[pulp.LpVariable, float]]]:
    """What each stage would put on the link up and down if nothing stayed inside."""
    chain = problem.chain
    up, down = [], []
    for c, variable in chosen:
        inside, ring = below[c.allocation], 0.0
        if inside < 1:
            ring = ring_bytes(chain.parameter_bytes[c.last] - chain.parameter_bytes[c.first], c.replicas, scenario.batch_microbatches)
        up.append((variable, unit * (ring + inside * (chain.forward_bytes[c.last] + chain.gradient_bytes[c.first]))))
        down.append((variable, unit * (ring + inside * (chain.forward_bytes[c.first] + chain.gradient_bytes[c.last]))))
    return up, down


def _pairing_rows(program: pulp.LpProblem, problem: Problem, index: int, cut: int, stays: pulp.LpVariable, ending: list[Choice],
                  beginning: list[Choice], pairings: Pairings) -> None:
    """If this allocation is chosen on one side, no more stays inside than it keeps with the other side's."""
    link = problem.topology.shared[index]
    for number, (at, link_index, allocation, receives) in enumerate(sorted(pairings.found)):
        if (at, link_index) != (cut, index):
            continue
        mine, others = (beginning, ending) if receives else (ending, beginning)
        chosen = pulp.LpAffineExpression([(variable, 1) for c, variable in mine if c.allocation == allocation])
        kept = []
        for c, variable in others:
            sender, receiver = (c.allocation, allocation) if receives else (allocation, c.allocation)
            sent = sum(sender[p] for p in link.below) / sum(sender)
            kept.append((variable, sent - problem.topology.crossings(sender, receiver)[index][0]))
        program += stays <= pulp.LpAffineExpression(kept) + (1 - chosen), f"pairing_{number}"
