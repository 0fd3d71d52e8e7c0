"""How many microbatches to keep in flight, decided by simulating.

The least depth (:func:`planner.spec.schedule.default_in_flight`) assumes that transfers are free and that
replicas never wait for one another. One or two microbatches more per link cover both; the right number is
the smallest with which the simulation reaches the closed form. Depths cannot be raised one stage at a
time: what a stage admits must come from the stage before it. With one, two and one replica, depths 4 2 1
take 1.5 times the closed form's time, 5 3 1 three times (the sixth forward of stage 1 waits for the first
backward of stage 0), 8 3 1 exactly its time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from planner.memory import depth_within_batch
from planner.simulation.simulate import pipeline_of, steady_microbatch_us
from planner.simulation.workload import workload_of
from planner.spec.plan import TOLERANCE, Plan
from planner.spec.profile import Profile
from planner.spec.schedule import default_in_flight

__all__ = ["Depth", "depth_with", "least_depth", "with_in_flight"]

MOST_EXTRA = 3  # more has not helped any pipeline whose links can carry it


class Depth(NamedTuple):
    """``in_flight`` of each stage, and the simulated steady time with it."""

    extra_per_link: int
    in_flight: tuple[int, ...]
    microbatch_us: float


def least_depth(plan: Plan, profile: Profile | None = None, *,
                fits: Callable[[tuple[int, ...]], bool] = lambda in_flight: True) -> Depth | None:
    """The smallest depth with which the plan is simulated within ``TOLERANCE`` of its closed form, else the fastest tried.

    ``fits`` says whether the devices' memory holds a depth; None when it holds none. Depths below the
    plan's own are not tried.
    """
    own, workload = pipeline_of(plan, 1).in_flight, workload_of(plan, profile)
    best: Depth | None = None
    tried: set[tuple[int, ...]] = set()
    for extra in range(MOST_EXTRA + 1):
        in_flight = own if extra == 0 else tuple(map(max, depth_with(plan, extra), own))
        if in_flight in tried or not fits(in_flight):
            continue
        tried.add(in_flight)
        found = Depth(extra, in_flight, steady_microbatch_us(with_in_flight(plan, in_flight), workload=workload))
        if best is None or found.microbatch_us < best.microbatch_us * (1 - TOLERANCE):
            best = found
        if best.microbatch_us <= plan.predicted.microbatch_us * (1 + TOLERANCE):
            break
    return best


def depth_with(plan: Plan, extra_per_link: int) -> tuple[int, ...]:
    """The depths with so many microbatches more per link than the least."""
    return tuple(depth_within_batch(plan.policy, depth, r, plan.batch_microbatches)
                 for depth, r in zip(default_in_flight(plan.replicas, extra_per_link), plan.replicas, strict=True))


def with_in_flight(plan: Plan, in_flight: tuple[int, ...]) -> Plan:
    """The plan with other depths; its predicted memory is left as it is."""
    stages = tuple(dataclasses.replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, in_flight, strict=True))
    return dataclasses.replace(plan, stages=stages)
