"""The integer linear program of one scenario and one time T: which candidates, each of cost <= T, make a plan?

A plan is a path from the first cut to the last whose arcs are stages. Families of rows:

``flow``      at every node as many arcs end as begin, and one begins at the first cut;
``capacity``  a place has only so many devices;
``cover``     some replica count is a multiple of each prime power of the batch (when it is their lcm);
``devices``   at least and at most so many in all; ``count``: exactly so many stages;
``pin``       so many stages end before the one with a pinned layer begins;
``load``      each shared link carries at most T times its bandwidth, in either direction.

The path runs through the full network of :mod:`planner.search.network` where that is small enough, and
through its coarser form (:mod:`planner.search.coarse`) otherwise; both give the same plans.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import pulp

from planner.cost import Evaluation, Stage, evaluate
from planner.search.coarse import Pairings, coarse_network, inside_rows
from planner.search.columns import Candidate
from planner.search.dive import least_total_load
from planner.search.network import Arc, Node, network
from planner.search.problem import Problem, Scenario, prime_powers
from planner.search.work import Work
from planner.solver import Status, run
from planner.spec.errors import PipedreamError

__all__ = ["Answer", "Effort", "any_plan", "fewest_devices", "least_load"]

MOST_TERMS = 150_000  # candidates times links of a coarse program; more take minutes
ARC_S = 5e-5  # to write down what one arc adds to a program
TOLERANCE = 1e-6  # the solver's own, relative to a row's right-hand side

Terms = list[tuple[pulp.LpVariable, float]]


class Answer(NamedTuple):
    """``stages`` is empty unless a plan was found; ``proven`` is false when time ran out."""

    stages: tuple[Stage, ...]
    microbatch_us: float  # by the cost model
    proven: bool


def any_plan(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, effort: Effort,
             deadline: float | None = None) -> Answer:
    """A plan within ``time_us``, whichever is found first.

    In all three functions the answer is unproven where the ``effort`` does not suffice.
    """
    cheap = [c for c in candidates if c.cost_us <= time_us]
    return _solve(problem, scenario, cheap, time_us, effort, deadline, any_solution=True)


def fewest_devices(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, effort: Effort,
                   deadline: float | None = None) -> Answer:
    """A plan within ``time_us`` with the fewest devices, then the fewest stages, then the fewest places."""
    cheap = [c for c in candidates if c.cost_us <= time_us]
    return _solve(problem, scenario, cheap, time_us, effort, deadline)


def least_load(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, effort: Effort,
               deadline: float | None = None) -> Answer:
    """Of the plans made of ``candidates``, one whose busiest shared link is least busy, if below ``time_us``."""
    return _solve(problem, scenario, candidates, time_us, effort, deadline, least=True)


class Effort(NamedTuple):
    """How large a full network may be, and what is known for the coarser one; None: it is not to be used."""

    most_arcs: int
    pairings: Pairings | None
    work: Work


class _Program(NamedTuple):
    program: pulp.LpProblem
    chosen: list[tuple[Candidate, pulp.LpVariable]]
    full: bool


def _solve(problem: Problem, scenario: Scenario, candidates: Sequence[Candidate], time_us: float, effort: Effort,
           deadline: float | None, *, least: bool = False, any_solution: bool = False) -> Answer:
    time_us = max(time_us, 1e-6)  # loads are measured in it; a model of no cost has T = 0
    if problem.topology.shared:
        for relaxed in (True, False) if problem.topology.interchangeable else (False,):
            arcs = network(problem, scenario, candidates, time_us, relaxed=relaxed, most_arcs=effort.most_arcs, work=effort.work,
                           deadline=deadline)
            if arcs is None:
                break
            answer = _solve_on(problem, scenario, arcs, None, time_us, deadline, least=least, any_solution=any_solution)
            if answer is not None:
                return answer
        if effort.pairings is None:
            return Answer((), 0.0, False)
    if len(candidates) * (len(problem.topology.shared) + 1) > MOST_TERMS:
        return Answer((), 0.0, False)
    arcs = coarse_network(problem, scenario, candidates)
    answer = _solve_on(problem, scenario, arcs, effort.pairings, time_us, deadline, least=least, any_solution=any_solution)
    return answer if answer is not None else Answer((), 0.0, False)


def _solve_on(problem: Problem, scenario: Scenario, arcs: list[Arc], pairings: Pairings | None, time_us: float, deadline: float | None, *,
              least: bool, any_solution: bool) -> Answer | None:
    """None when the network promised less than the cost model finds, because pairs of allocations were relaxed."""
    if not arcs:
        return Answer((), 0.0, True)
    if any_solution and pairings is None and problem.stages is None and scenario.min_devices == 1 and not problem.pins:
        stages = least_total_load(problem, scenario, arcs)
        if stages:
            quick = evaluate(problem.chain, problem.topology, problem.policy, stages, scenario.batch_microbatches)
            if quick.microbatch_us <= time_us:
                _check(problem, scenario, stages, quick, time_us)
                return Answer(stages, quick.microbatch_us, True)
    # A bare path program is totally unimodular: its linear relaxation is integral, and much faster.
    integer = len(problem.topology.places) > 1 or scenario.exact or problem.stages is not None or bool(problem.pins)
    while True:
        left_s = None if deadline is None else deadline - time.monotonic()
        if left_s is not None and left_s <= len(arcs) * ARC_S:  # it could not even be written down
            return Answer((), 0.0, False)
        built = _build(problem, scenario, arcs, pairings, time_us, integer=integer, least=least)
        status = run(built.program, time_limit_s=left_s, any_solution=any_solution)
        if not integer and any(1e-6 < (variable.value() or 0) < 1 - 1e-6 for _, variable in built.chosen):
            integer = True
            continue
        stages = _decode(problem, built.chosen, status)
        if not stages:
            return Answer((), 0.0, status == "infeasible")
        found = evaluate(problem.chain, problem.topology, problem.policy, stages, scenario.batch_microbatches)
        promised_us = max(c.cost_us for c, variable in built.chosen if (variable.value() or 0) > 0.5)
        if problem.topology.shared:
            promised_us = max(promised_us, built.program.objective.value() * time_us if least else time_us)
        if found.microbatch_us > promised_us * (1 + 10 * TOLERANCE) and problem.topology.shared:
            if pairings is None:
                return None
            if pairings.learn(problem, stages):
                continue
        _check(problem, scenario, stages, found, promised_us)
        return Answer(stages, found.microbatch_us, status == "optimal")


def _build(problem: Problem, scenario: Scenario, arcs: list[Arc], pairings: Pairings | None, time_us: float, *,
           integer: bool, least: bool) -> _Program:
    """``pairings`` is None for a full network, whose arcs know their loads."""
    program = pulp.LpProblem("plan", pulp.LpMinimize)
    variables: list[pulp.LpVariable] = []
    for index, arc in enumerate(arcs):
        name = f"transfer_{index}" if arc.candidate is None else f"stage_{index}_layers_{arc.candidate.first}_{arc.candidate.last}"
        variables.append(program.add_variable(name, 0, 1, "Integer" if integer and arc.candidate is not None else "Continuous"))
    chosen = [(arc.candidate, variable) for arc, variable in zip(arcs, variables, strict=True) if arc.candidate is not None]
    busiest = program.add_variable("busiest", 0, 1) if least else None
    program += busiest if busiest is not None else pulp.LpAffineExpression(_preferences(problem, arcs, variables))
    _flow_rows(program, problem, arcs, variables)
    _cover_rows(program, scenario, chosen)
    _device_rows(program, problem, scenario, chosen)
    _pin_rows(program, problem, chosen)
    if pairings is not None:
        _capacity_rows(program, problem, chosen)
        loads = inside_rows(program, problem, scenario, chosen, time_us, pairings)
    else:
        directions = range(2 * len(problem.topology.shared))
        loads = [[(v, arc.load[d]) for arc, v in zip(arcs, variables, strict=True) if arc.load[d]] for d in directions]
    for index, terms in enumerate(loads):
        if terms:
            limit = 1 if busiest is None else busiest
            program += pulp.LpAffineExpression(terms) <= limit, f"load_{index // 2}_{'down' if index % 2 else 'up'}"
    return _Program(program, chosen, pairings is None)


def _preferences(problem: Problem, arcs: list[Arc], variables: list[pulp.LpVariable]) -> Terms:
    """Fewest devices; then fewest stages; then fewest places beyond one, and recomputations; then the least load on shared links.

    Each weighs more than all that come after it can: the load of each direction of a link is at most 1.
    """
    layers, places, links = problem.chain.layer_count, len(problem.topology.places), 2 * len(problem.topology.shared) + 1
    terms: Terms = []
    for arc, variable in zip(arcs, variables, strict=True):
        weight = sum(arc.load)
        if arc.candidate is not None:
            used = sum(count > 0 for count in arc.candidate.allocation)
            worse = used - 1 + arc.candidate.recompute
            weight += ((arc.candidate.replicas * (layers + 1) + 1) * (layers * (places + 1) + 1) + worse) * links
        terms.append((variable, weight))
    return terms


def _flow_rows(program: pulp.LpProblem, problem: Problem, arcs: list[Arc], variables: list[pulp.LpVariable]) -> None:
    nodes: dict[Node, Terms] = defaultdict(list)
    start: Terms = []
    for arc, variable in zip(arcs, variables, strict=True):
        if arc.tail[0] == 0:
            start.append((variable, 1))
        else:
            nodes[arc.tail].append((variable, 1))
        nodes[arc.head].append((variable, -1))
    program += pulp.LpAffineExpression(start) == 1, "flow_start"
    inner = [node for node in sorted(nodes) if node[0] < problem.chain.end]
    for index, node in enumerate(inner):
        program += pulp.LpAffineExpression(nodes[node]) == 0, f"flow_{index}_at_{node[0]}"


def _capacity_rows(program: pulp.LpProblem, problem: Problem, chosen: list[tuple[Candidate, pulp.LpVariable]]) -> None:
    for index, place in enumerate(problem.topology.places):
        terms = [(variable, c.allocation[index]) for c, variable in chosen if c.allocation[index]]
        if len(problem.topology.places) > 1 and terms:
            program += pulp.LpAffineExpression(terms) <= place.count, f"capacity_{index}"


def _cover_rows(program: pulp.LpProblem, scenario: Scenario, chosen: list[tuple[Candidate, pulp.LpVariable]]) -> None:
    for power in prime_powers(scenario.multiple) if scenario.exact else ():
        terms = [(variable, 1) for c, variable in chosen if c.replicas % power == 0]
        program += pulp.LpAffineExpression(terms) >= 1, f"cover_{power}"


def _device_rows(program: pulp.LpProblem, problem: Problem, scenario: Scenario, chosen: list[tuple[Candidate, pulp.LpVariable]]) -> None:
    devices: Terms = [(variable, c.replicas) for c, variable in chosen]
    program += pulp.LpAffineExpression(devices) <= scenario.max_devices, "devices_most"
    if scenario.min_devices > 1:
        program += pulp.LpAffineExpression(devices) >= scenario.min_devices, "devices_least"
    if problem.stages is not None:
        program += pulp.LpAffineExpression([(variable, 1) for _, variable in chosen]) == problem.stages, "count"


def _pin_rows(program: pulp.LpProblem, problem: Problem, chosen: list[tuple[Candidate, pulp.LpVariable]]) -> None:
    for index, pin in enumerate(problem.pins):
        before = [(variable, 1) for c, variable in chosen if not problem.chain.has(c.last, pin.layer)]
        program += pulp.LpAffineExpression(before) == pin.stage, f"pin_{index}"


def _decode(problem: Problem, chosen: list[tuple[Candidate, pulp.LpVariable]], status: Status) -> tuple[Stage, ...]:
    """The path of the chosen arcs; empty when there is no solution, or none that is integral."""
    if status == "infeasible":
        return ()
    path = sorted((c for c, variable in chosen if (variable.value() or 0) > 0.5), key=lambda c: c.first)
    stages = tuple(Stage(c.first, c.last, c.allocation, c.recompute) for c in path)
    cuts = [0, *(stage.last for stage in stages)]
    if cuts[-1] == problem.chain.end and all(stage.first == cut for stage, cut in zip(stages, cuts, strict=False)):
        return stages
    if status == "optimal":
        raise PipedreamError(f"the solver's answer is not a path: stages {[tuple(stage[:2]) for stage in stages]}",
                             hint="please report this with the profile and the cluster")
    return ()


def _check(problem: Problem, scenario: Scenario, stages: tuple[Stage, ...], found: Evaluation, promised_us: float) -> None:
    """The program and the cost model must agree."""
    batch = problem.batch(stages)
    if found.microbatch_us > promised_us * (1 + 10 * TOLERANCE) or not found.fits or batch != scenario.batch_microbatches:
        raise PipedreamError(
            f"the integer program promised {promised_us:.9g} us with batches of {scenario.batch_microbatches}; the cost model finds "
            f"{found.microbatch_us:.9g} us with batches of {batch}{'' if found.fits else ', and that it does not fit in memory'}",
            hint="please report this with the profile and the cluster")
