"""Good plans found quickly, so that the exact search starts with a time to beat.

First plans that cost nothing to find: one device, data parallelism, an equal split. Then, for one batch, the
position-free optimum with its stages fitted into places one by one, which often is a real plan already; and its
stages, or better ones, laid along an *order* of the devices, each taking the next ones::

    packed   place by place                        server0: A A B C   server1: C C D D
    spread   one device of every place in turn     server0: A A B C   server1: A A B C
    between  the same over groups of places        so that each group runs a pipeline of its own

Stages along an order come from :mod:`planner.search.along`. What several transfers and rings sum up to on a link is seen
only when the whole plan is evaluated, so these plans are feasible, not optimal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from planner.cost import Stage, evaluate
from planner.hardware.topology import Allocation
from planner.search.along import stages_along
from planner.search.problem import Problem, Scenario
from planner.search.stage_arrays import Ints
from planner.search.work import Work

__all__ = ["allowed", "first_plans", "laid_plans", "plans_along"]

MOST_PLACES = 16  # for which groups of every size are tried
MOST_FITS = 2_000  # attempts to fit stages into places
Path = list[tuple[int, int, int, bool]]  # stages: first, last, replicas, whether they recompute


def first_plans(problem: Problem) -> Iterator[tuple[Stage, ...]]:
    """The fastest device alone, data parallelism on ever fewer devices, and as equal stages as consecutive states allow.

    Stages in numbers ever halved, of one replica each and on all devices: fewer stages have less in flight.
    """
    places, capacities, end = problem.topology.places, problem.topology.capacities, problem.chain.end
    alone = problem.topology.alone(problem.topology.fastest_place)
    order = [place for place, count in enumerate(capacities) for _ in range(count)]
    paths: list[Path] = []
    again = problem.recompute_choices[-1]  # where it may, a stage recomputes: rather slow than too large
    devices = min(problem.max_devices, problem.max_replicas)
    while devices > 1:
        paths.append([(0, end, devices, again)])
        devices //= 2
    halved = [problem.max_devices >> bit for bit in range(problem.max_devices.bit_length() - 1)]
    for count in [problem.stages] if problem.stages else sorted({-(-problem.max_devices // 2), *halved}):
        cuts = _equal_split(problem, count)
        for r in sorted({1, min(problem.max_devices // max(len(cuts), 1), problem.max_replicas)}):
            paths.append([(first, last, r, again) for first, last in cuts])
    for stages in ((Stage(0, end, alone, again),), *(_laid(path, order, len(places)) for path in paths)):
        if stages and allowed(problem, stages):
            yield stages


def laid_plans(problem: Problem, path: Path) -> Iterator[tuple[Stage, ...]]:
    """A relaxed plan on real devices; plans that fit them and have a batch the problem allows."""
    capacities = problem.topology.capacities
    for stages in (_fitted(path, capacities), *(_laid(path, _order(capacities, size), len(capacities)) for size in _sizes(capacities))):
        if stages and allowed(problem, stages):
            yield stages


def plans_along(problem: Problem, scenario: Scenario, rows: Ints, ceiling_us: float, work: Work,
                deadline: float | None) -> Iterator[tuple[Stage, ...]]:
    """The best stages along each order of the devices, of those in ``rows`` (as in :mod:`planner.search.stage_arrays`).

    Where places are taken in turn, each stage takes the same number of each, and then also any number.
    """
    capacities = problem.topology.capacities
    ways = [(_order(capacities, size), size) for size in _sizes(capacities)]
    if len(capacities) > 1:
        ways.append((_order(capacities, len(capacities)), 1))
        if len(problem.topology.interchangeable) < len(capacities) - 1:
            ways.append((_order(capacities, 1)[::-1], 1))  # unequal places: the last one first
    for order, unit in ways:
        for stages in stages_along(problem, scenario, order, unit, rows, ceiling_us, work, deadline):
            if allowed(problem, stages):
                yield stages


def _sizes(capacities: Allocation) -> list[int]:
    """Of groups of places that are taken in turn: 1, 2, 4, ... and all."""
    sizes = {*(1 << bit for bit in range(len(capacities).bit_length())), len(capacities)}
    return sorted(sizes if len(capacities) <= MOST_PLACES else {1, 2, len(capacities)})


def _order(capacities: Allocation, size: int) -> list[int]:
    """The devices, as the places that they belong to: group after group, and in a group one device of each place in turn."""
    order = []
    for start in range(0, len(capacities), size):
        group = range(start, min(start + size, len(capacities)))
        order += [place for turn in range(max(capacities[p] for p in group)) for place in group if turn < capacities[place]]
    return order


def _laid(path: Path, order: list[int], places: int) -> tuple[Stage, ...]:
    """The stages on consecutive devices of the order, the first stage on the first; () where it is too short."""
    stages, begin = [], 0
    if sum(r for _, _, r, _ in path) > len(order):
        return ()
    for first, last, r, again in path:
        allocation = [0] * places
        for place in order[begin:begin + r]:
            allocation[place] += 1
        stages.append(Stage(first, last, tuple(allocation), again))
        begin += r
    return tuple(stages)


def _equal_split(problem: Problem, count: int) -> list[tuple[int, int]]:
    """At most ``count`` stages of about the same compute, along states of which each is inside the next."""
    chain = problem.chain
    masks = chain.states.masks
    cuts = [0]
    total_us = chain.compute_us[chain.end] or 1.0
    steps = [0]
    for state in range(1, chain.end + 1):  # one way through the states, the smallest step at a time
        if masks[steps[-1]] & ~masks[state] == 0:
            steps.append(state)
    inner = steps[1:-1]
    for number in range(1, count):
        wanted = [state for state in inner if state > cuts[-1]]
        left = count - number - 1  # cuts that are still to come
        if problem.stages is not None and left:
            wanted = wanted[:len(wanted) - left]
        if not wanted:
            break
        goal_us = total_us * number / count
        cuts.append(min(wanted, key=lambda state: (abs(chain.compute_us[state] - goal_us), state)))
    cuts.append(chain.end)
    return list(itertools.pairwise(cuts))


def _fitted(path: Path, capacities: Allocation) -> tuple[Stage, ...]:
    """The stages, each whole in one place, the largest first; () if they do not fit that way."""
    order = sorted(range(len(path)), key=lambda k: (-path[k][2], k))
    left, chosen, attempts = list(capacities), [0] * len(path), 0

    def fit(position: int) -> bool:
        nonlocal attempts
        attempts += 1
        if position == len(order):
            return True
        replicas = path[order[position]][2]
        tried = set()
        for place, free in enumerate(left):  # places with as much left are alike
            if free >= replicas and free not in tried and attempts < MOST_FITS:
                tried.add(free)
                left[place] -= replicas
                chosen[order[position]] = place
                if fit(position + 1):
                    return True
                left[place] += replicas
        return False

    if not path or len(path) > 500 or path[order[0]][2] > max(capacities) or not fit(0):
        return ()
    return tuple(Stage(first, last, tuple(r if p == place else 0 for p in range(len(capacities))), recompute)
                 for (first, last, r, recompute), place in zip(path, chosen, strict=True))


def allowed(problem: Problem, stages: tuple[Stage, ...]) -> bool:
    """By the same rules as every plan: the batch it really has, and the memory it then needs."""
    replicas = [stage.replicas for stage in stages]
    if problem.stages is not None and len(stages) != problem.stages:
        return False
    if max(replicas) > problem.max_replicas or sum(replicas) > problem.max_devices:
        return False
    batch = problem.batch(stages)
    if any(batch % r for r in replicas):
        return False
    too_long = problem.batch_microbatches is None and math.lcm(*replicas) > problem.max_devices
    too_short = problem.policy == "2bw" and batch < sum(replicas)
    uneven = problem.equal_replicas and len(set(replicas)) > 1
    if too_long or too_short or uneven or not problem.keeps_pins(stages):
        return False
    return evaluate(problem.chain, problem.topology, problem.policy, stages, batch).fits
