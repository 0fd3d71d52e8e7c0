"""Why a simulated pipeline is slower than the closed form says, and which depth would help.

The closed form assumes that the bottleneck never waits. It does wait when too few microbatches are in
flight to cover the way to the last stage and back, and where replicas meet at updates.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from planner.simulation.depth import Depth, least_depth
from planner.simulation.simulate import Simulation
from planner.simulation.steady import steady_operations
from planner.spec.plan import TOLERANCE, Plan
from planner.spec.profile import Profile
from planner.spec.units import format_duration_us

__all__ = ["Difference", "difference", "wait_shares", "waiting_words"]

_WAITS = {"F": "activations", "B": "gradients", "U": "the other replicas"}


class Difference(NamedTuple):
    """``wait_shares``: of the busiest stage's time, by what it waits for. ``deeper`` is the least depth that helps, if one does."""

    ratio: float  # simulated / predicted
    stage: int
    wait_shares: dict[str, float]
    deeper: Depth | None

    def sentence(self) -> str:
        """Why, and what would help."""
        waiting = waiting_words(self.stage, self.wait_shares)
        if self.deeper is None:
            return f"{waiting}; more microbatches in flight do not help"
        depths = ", ".join(map(str, self.deeper.in_flight))
        return f"{waiting}; with {depths} microbatches in flight it would be {format_duration_us(self.deeper.microbatch_us)}"


def difference(plan: Plan, profile: Profile | None, simulation: Simulation) -> Difference | None:
    """Why the steady time differs by more than :data:`TOLERANCE`; None where it does not, or is not known."""
    predicted_us, simulated_us = plan.predicted.microbatch_us, simulation.microbatch_us
    if simulated_us is None or simulated_us <= predicted_us * (1 + TOLERANCE):
        return None
    k, shares = wait_shares(plan, simulation)
    depth = least_depth(plan, profile)
    return Difference(simulated_us / predicted_us if predicted_us > 0 else math.inf, k, shares,
                      depth if depth is not None and depth.extra_per_link > 0 else None)


def wait_shares(plan: Plan, simulation: Simulation) -> tuple[int, dict[str, float]]:
    """The busiest stage, and the shares of its steady time in which it waits, by what for."""
    k = max(range(len(plan.stages)), key=lambda stage: plan.predicted.stages[stage].microbatch_us)
    waited_us, span_us = dict.fromkeys(_WAITS.values(), 0.0), 0.0
    for replica in simulation.record.workers[k]:
        operations, length_us = steady_operations(replica, simulation.pipeline)
        span_us += length_us
        for done in operations:
            waited_us[_WAITS[done.op.kind]] += done.begin_us - done.ready_us
    return k, {what: us / span_us if span_us > 0 else 0.0 for what, us in waited_us.items()}


def waiting_words(stage: int, shares: dict[str, float]) -> str:
    """What :func:`wait_shares` found, in words.

    >>> waiting_words(1, {"activations": 0.25, "gradients": 0.0, "the other replicas": 0.1})
    'stage 1 waits 25% for activations and 10% for the other replicas'
    """
    waits = [f"{share:.0%} for {what}" for what, share in shares.items() if share >= 0.005]
    return f"stage {stage} waits {' and '.join(waits)}" if waits else "messages that share a link delay one another"
