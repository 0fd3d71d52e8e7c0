"""From counted devices to named ones."""

from __future__ import annotations

from planner.cost import Stage, evaluate
from planner.hardware.topology import Topology
from planner.search.problem import Problem

__all__ = ["assign_devices", "in_order_of_use"]


def assign_devices(topology: Topology, stages: tuple[Stage, ...]) -> list[tuple[str, ...]]:
    """The devices of each stage's replicas: the next free ones of the places that the order of replicas names."""
    free = [0] * len(topology.places)
    named = []
    for stage in stages:
        paths = []
        for place in topology.order(stage.allocation):
            paths.append(topology.places[place].device(free[place]))
            free[place] += 1
        named.append(tuple(paths))
    return named


def in_order_of_use(problem: Problem, stages: tuple[Stage, ...], batch_microbatches: int) -> tuple[Stage, ...]:
    """The same plan with equal places numbered as the stages come to them, if that costs the same in every detail.

    The search numbers them from the last stage. Replicas dealt to odd allocations may pair up less well
    under other numbers (:meth:`planner.hardware.topology.Topology.order`); then the plan stays as it is.
    """
    topology = problem.topology
    number = list(range(len(topology.places)))  # place -> its new number
    for group in _groups(topology):
        order = sorted(group, key=lambda p: next((k for k, stage in enumerate(stages) if stage.allocation[p]), len(stages)))
        for new, place in zip(group, order, strict=True):
            number[place] = new
    back = sorted(range(len(number)), key=lambda place: number[place])
    renamed = tuple(Stage(stage.first, stage.last, tuple(stage.allocation[place] for place in back), stage.recompute) for stage in stages)
    before = evaluate(problem.chain, topology, problem.policy, stages, batch_microbatches)
    after = evaluate(problem.chain, topology, problem.policy, renamed, batch_microbatches)
    same = before.microbatch_us == after.microbatch_us and sorted(before.shared_link_bytes) == sorted(after.shared_link_bytes)
    return renamed if same else stages


def _groups(topology: Topology) -> list[list[int]]:
    """Runs of interchangeable places."""
    groups: list[list[int]] = []
    for p, q in topology.interchangeable:
        if groups and groups[-1][-1] == p:
            groups[-1].append(q)
        else:
            groups.append([p, q])
    return groups
