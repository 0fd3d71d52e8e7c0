"""The integer linear program of one scenario and one time T: which candidates, each of cost <= T, make a plan?

A plan is a path from the first cut to the last whose arcs are stages. Families of rows:

``flow``      at every cut as many stages end as begin, and one begins at the first cut;
``capacity``  a place has only so many devices;
``cover``     some replica count is a multiple of each prime power of the batch (when it is their lcm);
``devices``   at least and at most so many in all; ``count``: exactly so many stages;
``load``      each shared link carries at most T times its bandwidth, in either direction.

When memory limits bind, nodes are (cut, devices after it) instead of cuts: what runs after a stage
decides what it holds, so the limit removes arcs and needs no row.

The load of a shared link depends on pairs of consecutive stages. Let I(a) be the share of a stage's
replicas below the link. Of the microbatches of a cut, the share that stays inside is a variable::

    inside <= I(stage that ends)      inside <= I(stage that begins)
    leaves = I(ends) - inside         enters = I(begins) - inside

which is exact for packed stages and for stages in equal proportions. Where the real pairing of two
allocations keeps less inside, :class:`Pairings` adds rows, and the program is solved again.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pulp

from planner.columns import Candidate
from planner.cost import Stage, evaluate, ring_bytes
from planner.problem import Problem, Scenario, prime_powers
from planner.solver import Status, run
from planner.spec.errors import PipedreamError
from planner.topology import Allocation

__all__ = ["Answer", "Pairings", "fewest_devices", "least_load"]

TOLERANCE = 1e-6  # the solver's own, relative to a row's right-hand side


class Answer(NamedTuple):
    """``stages`` is empty unless a plan was found; ``proven`` is false when time ran out."""

    stages: tuple[Stage, ...]
    microbatch_us: float  # by the cost model
    proven: bool


@dataclass
class Pairings:
    """Pairs of allocations met so far whose transfers stay inside less than the relaxation thought."""

    found: set[tuple[int, int, Allocation, bool]] = field(default_factory=set)  # cut, shared link, allocation, whether it receives

    def learn(self, problem: Problem, stages: tuple[Stage, ...]) -> bool:
        """Note the pairs of a plan; False when all were known."""
        known = len(self.found)
        topology = problem.topology
        for sender, receiver in itertools.pairwise(stages):
            for index, (leaves, enters) in enumerate(topology.crossings(sender.allocation, receiver.allocation)):
                if min(leaves, enters) > 1e-12:  # the relaxation keeps min(I, I') inside: one of the two is zero
                    self.found.add((sender.last, index, sender.allocation, False))
                    self.found.add((sender.last, index, receiver.allocation, True))
        return len(self.found) > known


class _Arc(NamedTuple):
    candidate: Candidate
    after: int | None  # devices after the stage, where nodes say it
    chosen: pulp.LpVariable


def fewest_devices(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, pairings: Pairings,
                   deadline: float | None = None) -> Answer:
    """A plan within ``time_us`` with the fewest devices, then the fewest stages, then the fewest places."""
    return _solve(problem, scenario, [c for c in candidates if c.cost_us <= time_us], time_us, pairings, deadline, least=False)


def least_load(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, pairings: Pairings,
               deadline: float | None = None) -> Answer:
    """Of the plans made of ``candidates``, one whose busiest shared link is least busy, if below ``time_us``."""
    return _solve(problem, scenario, candidates, time_us, pairings, deadline, least=True)


def _solve(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, pairings: Pairings,
           deadline: float | None, *, least: bool) -> Answer:
    # A bare path program is totally unimodular: its linear relaxation is integral, and much faster.
    integer = least or bool(problem.topology.shared) or len(problem.topology.places) > 1 or scenario.exact or problem.stages is not None
    while True:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= 0:
            return Answer((), 0.0, False)
        program, arcs = _build(problem, scenario, candidates, time_us, pairings, integer=integer, least=least)
        status = run(program, time_limit_s=left_s) if arcs else "infeasible"
        if not integer and any(1e-6 < (arc.chosen.value() or 0) < 1 - 1e-6 for arc in arcs):
            integer = True
            continue
        stages = _decode(problem, arcs, status)
        if not stages:
            return Answer((), 0.0, status == "infeasible")
        batch = scenario.batch_microbatches
        found = evaluate(problem.chain, problem.topology, problem.policy, stages, batch)
        wanted_us = max([time_us if not least else program.objective.value() * time_us, *(_cost(arcs))])
        if found.microbatch_us <= wanted_us * (1 + 2 * TOLERANCE) or not problem.topology.shared:
            _check(problem, scenario, stages, found.microbatch_us, wanted_us, found.fits)
            return Answer(stages, found.microbatch_us, status == "optimal")
        if not pairings.learn(problem, stages):
            _check(problem, scenario, stages, found.microbatch_us, wanted_us, found.fits)


def _build(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, pairings: Pairings, *,
           integer: bool, least: bool) -> tuple[pulp.LpProblem, list[_Arc]]:
    program = pulp.LpProblem("plan", pulp.LpMinimize)
    arcs = _arcs(problem, scenario, candidates, program, "Integer" if integer else "Continuous")
    if not arcs:
        return program, []
    busiest = program.add_variable("busiest", 0, 1) if least else None
    program += busiest if busiest is not None else pulp.LpAffineExpression([(arc.chosen, _weight(problem, arc.candidate)) for arc in arcs])
    _flow_rows(program, problem, arcs)
    _capacity_rows(program, problem, arcs)
    _cover_rows(program, scenario, arcs)
    _device_rows(program, problem, scenario, arcs)
    if problem.topology.shared:
        _load_rows(program, problem, scenario, arcs, time_us, busiest, pairings)
    return program, arcs


def _weight(problem: Problem, candidate: Candidate) -> int:
    """Devices first; equal ones by stages, then by places used beyond one for each stage."""
    places = sum(count > 0 for count in candidate.allocation)
    layers, most_places = problem.chain.layer_count, len(problem.topology.places)
    return (candidate.replicas * (layers + 1) + 1) * (layers * most_places + 1) + places - 1


def _arcs(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], program: pulp.LpProblem, kind: str) -> list[_Arc]:
    """A variable for each candidate, or for each number of devices after it where that decides whether it fits."""
    n = problem.chain.layer_count
    expanded = any(c.last < n and c.max_after < scenario.max_devices - c.replicas for c in candidates)
    arcs: list[_Arc] = []
    reached: dict[int, set[int]] = defaultdict(set, {n: {0}})
    for index, c in sorted(enumerate(candidates), key=lambda entry: (-entry[1].first, entry[0])):
        afters = sorted(reached[c.last]) if expanded else [None] if reached[c.last] else []
        for after in afters:
            if after is not None and (after > c.max_after or after + c.replicas > scenario.max_devices):
                continue
            reached[c.first].add(0 if after is None else after + c.replicas)
            name = f"stage_{c.first}_{c.last}_at_{index}" + ("" if after is None else f"_before_{after}")
            arcs.append(_Arc(c, after, program.add_variable(name, 0, 1, kind)))
    return arcs if reached[0] else []


def _flow_rows(program: pulp.LpProblem, problem: Problem, arcs: list[_Arc]) -> None:
    n = problem.chain.layer_count
    nodes: dict[tuple[int, int], list[tuple[pulp.LpVariable, int]]] = defaultdict(list)
    for arc in arcs:
        after = arc.after or 0
        before = 0 if arc.after is None or arc.candidate.first == 0 else after + arc.candidate.replicas
        nodes[arc.candidate.first, before].append((arc.chosen, 1))
        nodes[arc.candidate.last, after].append((arc.chosen, -1))
    for (cut, after), terms in sorted(nodes.items(), key=lambda entry: entry[0]):
        if cut < n:
            program += pulp.LpAffineExpression(terms) == (1 if cut == 0 else 0), f"flow_{cut}_{after}"


def _capacity_rows(program: pulp.LpProblem, problem: Problem, arcs: list[_Arc]) -> None:
    for index, place in enumerate(problem.topology.places):
        terms = [(arc.chosen, arc.candidate.allocation[index]) for arc in arcs if arc.candidate.allocation[index]]
        if len(problem.topology.places) > 1 and terms:
            program += pulp.LpAffineExpression(terms) <= place.count, f"capacity_{index}"


def _cover_rows(program: pulp.LpProblem, scenario: Scenario, arcs: list[_Arc]) -> None:
    for power in prime_powers(scenario.multiple) if scenario.exact else ():
        terms = [(arc.chosen, 1) for arc in arcs if arc.candidate.replicas % power == 0]
        program += pulp.LpAffineExpression(terms) >= 1, f"cover_{power}"


def _device_rows(program: pulp.LpProblem, problem: Problem, scenario: Scenario, arcs: list[_Arc]) -> None:
    devices = pulp.LpAffineExpression([(arc.chosen, arc.candidate.replicas) for arc in arcs])
    program += devices <= scenario.max_devices, "devices_most"
    if scenario.min_devices > 1:
        program += devices >= scenario.min_devices, "devices_least"
    if problem.stages is not None:
        program += pulp.LpAffineExpression([(arc.chosen, 1) for arc in arcs]) == problem.stages, "count"


def _load_rows(program: pulp.LpProblem, problem: Problem, scenario: Scenario, arcs: list[_Arc], time_us: float,
               busiest: pulp.LpVariable | None, pairings: Pairings) -> None:
    """Loads in units of what the link carries in ``time_us``: at most 1, or at most the busiest, which is minimised."""
    chain, topology = problem.chain, problem.topology
    limit = 1 if busiest is None else busiest
    for index, link in enumerate(topology.shared):
        unit = 1e6 / (link.link.bandwidth_bytes_per_s * time_us)
        up: list[tuple[pulp.LpVariable, float]] = []
        down: list[tuple[pulp.LpVariable, float]] = []
        ending: dict[int, list[_Arc]] = defaultdict(list)
        beginning: dict[int, list[_Arc]] = defaultdict(list)
        share: dict[Allocation, float] = {}
        for arc in arcs:
            c = arc.candidate
            if c.allocation not in share:
                share[c.allocation] = sum(c.allocation[p] for p in link.below) / c.replicas
            inside = share[c.allocation]
            if not inside:
                continue
            ring = 0.0
            if inside < 1:
                ring = ring_bytes(chain.parameter_bytes[c.last] - chain.parameter_bytes[c.first], c.replicas, scenario.batch_microbatches)
            up.append((arc.chosen, unit * (ring + inside * (chain.forward_bytes[c.last] + chain.gradient_bytes[c.first]))))
            down.append((arc.chosen, unit * (ring + inside * (chain.forward_bytes[c.first] + chain.gradient_bytes[c.last]))))
            ending[c.last].append(arc)
            beginning[c.first].append(arc)
        for cut in sorted(ending.keys() & beginning.keys()):
            stays = program.add_variable(f"inside_{index}_{cut}", 0, 1)
            crossing = -unit * (chain.forward_bytes[cut] + chain.gradient_bytes[cut])
            up.append((stays, crossing))
            down.append((stays, crossing))
            for side, group in (("ends", ending[cut]), ("begins", beginning[cut])):
                terms = [(arc.chosen, share[arc.candidate.allocation]) for arc in group]
                program += stays <= pulp.LpAffineExpression(terms), f"inside_{index}_{cut}_{side}"
            _pairing_rows(program, problem, index, cut, stays, ending[cut], beginning[cut], pairings)
        program += pulp.LpAffineExpression(up) <= limit, f"load_{index}_up"
        program += pulp.LpAffineExpression(down) <= limit, f"load_{index}_down"


def _pairing_rows(program: pulp.LpProblem, problem: Problem, index: int, cut: int, stays: pulp.LpVariable, ending: list[_Arc],
                  beginning: list[_Arc], pairings: Pairings) -> None:
    """If this allocation is chosen on one side, no more stays inside than it keeps with the other side's."""
    for at, link, allocation, receives in sorted(pairings.found):
        if (at, link) != (cut, index):
            continue
        mine, others = (beginning, ending) if receives else (ending, beginning)
        chosen = pulp.LpAffineExpression([(arc.chosen, 1) for arc in mine if arc.candidate.allocation == allocation])
        kept = []
        for arc in others:
            other = arc.candidate.allocation
            pair = (other, allocation) if receives else (allocation, other)
            sent = sum(pair[0][p] for p in problem.topology.shared[link].below) / sum(pair[0])
            kept.append((arc.chosen, sent - problem.topology.crossings(*pair)[link][0]))
        program += stays <= pulp.LpAffineExpression(kept) + (1 - chosen), f"pair_{link}_{cut}_{receives:d}_{'_'.join(map(str, allocation))}"


def _cost(arcs: list[_Arc]) -> list[float]:
    return [arc.candidate.cost_us for arc in arcs if (arc.chosen.value() or 0) > 0.5]


def _decode(problem: Problem, arcs: list[_Arc], status: Status) -> tuple[Stage, ...]:
    """The path of the chosen arcs; empty when there is no solution, or none that is integral."""
    if status == "infeasible":
        return ()
    chosen = sorted((arc.candidate for arc in arcs if (arc.chosen.value() or 0) > 0.5), key=lambda c: c.first)
    stages = tuple(Stage(c.first, c.last, c.allocation) for c in chosen)
    cuts = [0, *(stage.last for stage in stages)]
    if cuts[-1] != problem.chain.layer_count or any(stage.first != cut for stage, cut in zip(stages, cuts, strict=False)):
        if status == "optimal":
            raise PipedreamError(f"the solver's answer is not a path: stages {[tuple(stage[:2]) for stage in stages]}",
                                 hint="please report this with the profile and the cluster")
        return ()
    return stages


def _check(problem: Problem, scenario: Scenario, stages: tuple[Stage, ...], evaluated_us: float, wanted_us: float, fits: bool) -> None:
    """The program and the cost model must agree."""
    batch = problem.batch(stages)
    if evaluated_us > wanted_us * (1 + 10 * TOLERANCE) or not fits or batch != scenario.batch_microbatches:
        raise PipedreamError(
            f"the integer program promised {wanted_us:.9g} us and batches of {scenario.batch_microbatches}, the cost model finds "
            f"{evaluated_us:.9g} us, batches of {batch}{'' if fits else ' and too little memory'}",
            hint="please report this with the profile and the cluster")
