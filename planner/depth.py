"""How many microbatches the finished plan keeps in flight, and the time its schedule then takes.

The search counts memory for the least depth that keeps every stage busy where transfers are free. The plan
found is then simulated with that depth and with more, as far as memory allows
(:mod:`planner.simulation.depth`), and the plan keeps the least depth that is fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from planner.cost import Evaluation
from planner.simulation.depth import Depth, depth_with, least_depth, with_in_flight
from planner.simulation.simulate import operations_to_simulate, pipeline_of
from planner.spec.errors import BadInput, Infeasible
from planner.spec.plan import Plan, StagePlan
from planner.spec.policies import POLICIES
from planner.spec.profile import Profile
from planner.spec.units import format_bytes

__all__ = ["with_depth"]

MOST_SIMULATED = 100_000  # operations: about two seconds; larger plans are not simulated here
_DEEPER = 1  # more microbatches per link, where that cannot be decided by simulating


def with_depth(plan: Plan, profile: Profile, evaluated: Callable[[tuple[int, ...]], Evaluation], extra: int | None,
               deadline: float | None = None) -> Plan:
    """The plan with the depths it should have, their memory, and its simulated time.

    After ``deadline``, a :func:`time.monotonic`, nothing is simulated.
    ``evaluated`` costs the plan at a depth; ``extra`` fixes the microbatches more per link.

    Raises:
        Infeasible: ``extra`` was given, and its depths do not fit in memory.
        BadInput: ``extra`` was given, and the policy cannot run so deep with batches this short.
    """
    small = operations_to_simulate(plan) <= MOST_SIMULATED and (deadline is None or time.monotonic() < deadline)

    def fits(in_flight: tuple[int, ...]) -> bool:
        return evaluated(in_flight).fits and _allowed(plan, in_flight)

    if extra is not None:
        in_flight = depth_with(plan, extra)
        _refuse(plan, extra, in_flight, evaluated(in_flight))
        deeper = replace(plan, stages=_stages(plan, in_flight))
        chosen = least_depth(deeper, profile, fits=lambda depths: depths == in_flight) if small else None
    elif small:
        chosen = least_depth(plan, profile, fits=fits)
        in_flight = _plan_depth(plan) if chosen is None else chosen.in_flight
    else:
        chosen, in_flight = None, depth_with(plan, _DEEPER)
        in_flight = in_flight if len(plan.stages) > 1 and fits(in_flight) else _plan_depth(plan)
    return _at(plan, in_flight, evaluated(in_flight), chosen)


def _plan_depth(plan: Plan) -> tuple[int, ...]:
    """Microbatches in flight of each stage."""
    return tuple(stage.in_flight for stage in plan.stages)


def _at(plan: Plan, in_flight: tuple[int, ...], result: Evaluation, depth: Depth | None) -> Plan:
    stages = tuple(replace(stage, memory=memory) for stage, memory in zip(plan.predicted.stages, result.memory, strict=True))
    predicted = replace(plan.predicted, stages=stages, simulated_us=None if depth is None else depth.microbatch_us)
    return replace(plan, stages=_stages(plan, in_flight), predicted=predicted)


def _stages(plan: Plan, in_flight: tuple[int, ...]) -> tuple[StagePlan, ...]:
    return tuple(replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, in_flight, strict=True))


def _allowed(plan: Plan, in_flight: tuple[int, ...]) -> bool:
    """Whether the policy can run so deep: ``2bw`` needs batches as long as the pipeline is deep."""
    try:
        POLICIES[plan.policy].check(pipeline_of(with_in_flight(plan, in_flight), 1))
    except BadInput:
        return False
    return True


def _refuse(plan: Plan, extra: int, in_flight: tuple[int, ...], result: Evaluation) -> None:
    POLICIES[plan.policy].check(pipeline_of(with_in_flight(plan, in_flight), 1))
    for k, (memory, available) in enumerate(zip(result.memory, result.available_bytes, strict=True)):
        if available is not None and memory.total_bytes > available:
            raise Infeasible(
                f"--extra-in-flight {extra} needs {format_bytes(memory.total_bytes)} on each device of stage {k}, "
                f"{format_bytes(available)} are available", hint="leave --extra-in-flight out: the planner goes as deep as fits",
                code="infeasible_memory")
