"""A plan in words."""

from __future__ import annotations

from planner.simulation.difference import wait_shares, waiting_words
from planner.simulation.simulate import simulate
from planner.spec.plan import Plan
from planner.spec.profile import Profile
from planner.spec.units import format_bandwidth, format_bytes, format_duration_us

__all__ = ["bottleneck_sentence", "why_slower"]


def bottleneck_sentence(plan: Plan) -> str:
    """What bounds the plan's throughput, in one sentence, with the numbers."""
    kind, _, name = plan.predicted.bottleneck.partition(" ")
    total = format_duration_us(plan.predicted.microbatch_us)
    if kind == "link":
        link = next(link for link in plan.predicted.links if link.link == name)
        rate = format_bandwidth(link.load_bytes / link.microbatch_us * 1e6)
        return f"The link of {name} bounds the pipeline: it moves {format_bytes(link.load_bytes)} in {total} per microbatch at {rate}."
    index = int(name)
    stage, cost = plan.stages[index], plan.predicted.stages[index]
    layers = stage.layers[0] if len(stage.layers) == 1 else f"{stage.layers[0]} to {stage.layers[-1]}"
    parts = {"compute": cost.compute_us, "the update": cost.update_us, "the all-reduce": cost.allreduce_us,
             "waiting while the pipeline fills and drains": cost.fill_us}
    largest = max(parts, key=lambda part: parts[part])
    part = format_duration_us(parts[largest])
    share = f", {part} of it {largest}" if part != total else f", all of it {largest}" if parts[largest] == cost.microbatch_us else (
        f", nearly all of it {largest}")
    replicas = "" if len(stage.devices) == 1 else f" on {len(stage.devices)} replicas"
    return f"Stage {index} ({layers}{replicas}) bounds the pipeline: {total} per microbatch{share}."


def why_slower(plan: Plan, profile: Profile) -> str | None:
    """What the plan's own schedule waits for, where its simulated time is more than the closed form's; None where it is not."""
    return waiting_words(*wait_shares(plan, simulate(plan, profile))) if plan.predicted.waits else None
