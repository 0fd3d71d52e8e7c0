"""Why a simulated pipeline is slower than the closed form says, found by simulating what would help.

The closed form assumes that the bottleneck never waits. It does wait when too few microbatches are in
flight to cover the way to the last stage and back: with one per stage, a transfer as long as a stage's
compute leaves the stage idle, and so do replicas, which meet only at updates. One or two microbatches
more per link (``extra_per_link`` of :func:`planner.spec.schedule.default_in_flight`) cover both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

from planner.simulate import Simulation, steady_microbatch_us
from planner.simulation.steady import steady_operations
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.schedule import default_in_flight
from planner.spec.units import format_duration_us

__all__ = ["TOLERANCE", "Deeper", "Difference", "difference"]

TOLERANCE = 0.01  # relative: what closed form and simulation may differ by without a word
_WAITS = {"F": "activations", "B": "gradients", "U": "the other replicas"}


class Deeper(NamedTuple):
    """The same plan with ``extra_per_link`` microbatches more in flight."""

    extra_per_link: int
    in_flight: tuple[int, ...]
    microbatch_us: float


class Difference(NamedTuple):
    """``wait_shares``: of the busiest stage's time, by what it waits for. ``deeper`` is the first depth that helps, if one does."""

    ratio: float  # simulated / predicted
    stage: int
    wait_shares: dict[str, float]
    deeper: Deeper | None

    def sentence(self) -> str:
        """Why, and what would help."""
        waits = [f"{share:.0%} for {what}" for what, share in self.wait_shares.items() if share >= 0.005]
        waiting = f"stage {self.stage} waits {' and '.join(waits)}" if waits else "the links are shared at the wrong moments"
        if self.deeper is None:
            return f"{waiting}; more microbatches in flight do not help"
        depths = ", ".join(map(str, self.deeper.in_flight))
        return f"{waiting}; with {depths} microbatches in flight it would be {format_duration_us(self.deeper.microbatch_us)}"


def difference(plan: Plan, profile: Profile | None, simulation: Simulation) -> Difference | None:
    """Why the steady time differs by more than :data:`TOLERANCE`; None where it does not, or is not known."""
    predicted_us, simulated_us = plan.predicted.microbatch_us, simulation.microbatch_us
    if simulated_us is None or simulated_us <= predicted_us * (1 + TOLERANCE):
        return None
    k = max(range(len(plan.stages)), key=lambda stage: plan.predicted.stages[stage].microbatch_us)
    waited_us, span_us = dict.fromkeys(_WAITS.values(), 0.0), 0.0
    for replica in simulation.record.workers[k]:
        operations, length_us = steady_operations(replica, simulation.pipeline)
        span_us += length_us
        for done in operations:
            waited_us[_WAITS[done.op.kind]] += done.begin_us - done.ready_us
    deeper = None
    for extra in (1, 2, 3):
        depths = tuple(map(max, default_in_flight(plan.replicas, extra), simulation.pipeline.in_flight))
        candidate_us = steady_microbatch_us(_with_depths(plan, depths), profile)
        if candidate_us < (simulated_us if deeper is None else deeper.microbatch_us) * (1 - TOLERANCE):
            deeper = Deeper(extra, depths, candidate_us)
        if candidate_us <= predicted_us * (1 + TOLERANCE):
            break
    return Difference(simulated_us / predicted_us if predicted_us > 0 else math.inf, k,
                      {what: us / span_us if span_us > 0 else 0.0 for what, us in waited_us.items()}, deeper)


def _with_depths(plan: Plan, depths: tuple[int, ...]) -> Plan:
    stages = tuple(dataclasses.replace(stage, in_flight=depth) for stage, depth in zip(plan.stages, depths, strict=True))
    return dataclasses.replace(plan, stages=stages)
