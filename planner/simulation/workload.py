"""What a plan's workers compute and send, operation by operation: the simulation's input.

The plan holds each stage's compute per microbatch, forward and backward together, and the load of
each link. The profile it was made from says how compute divides into forward and backward and what
crosses each cut. Without the profile both are recovered from the plan, under two assumptions that
:attr:`Workload.assumptions` names: a backward takes twice a forward, and a gradient is as large as
its activation. The link of a device of stage k then carries, each way, per microbatch of the pipeline,
``(cut_k + cut_{k+1}) / r_k + ring``: from the first stage on, each load gives the next cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.cost import ring_bytes
from planner.spec.errors import Mismatch
from planner.spec.files import digest
from planner.spec.plan import Plan
from planner.spec.profile import Profile

__all__ = ["StageWorkload", "Workload", "workload_of"]


@dataclass(frozen=True)
class StageWorkload:
    """One stage. Times are per replica, so that a slower device is slower; bytes are per message."""

    forward_us: tuple[float, ...]
    backward_us: tuple[float, ...]
    update_us: tuple[float, ...]  # optimizer and weight copy, once a batch
    ring_bytes: float  # over each link of the all-reduce's ring and direction, once a batch
    activation_bytes: float  # of one microbatch, to the next stage
    gradient_bytes: float  # of one microbatch, from the next stage


@dataclass(frozen=True)
class Workload:
    """Every stage, and what was assumed because nothing said it."""

    stages: tuple[StageWorkload, ...]
    assumptions: tuple[str, ...]


def workload_of(plan: Plan, profile: Profile | None = None) -> Workload:
    """The plan's workload; ``profile`` is the one that the plan was made from.

    Raises:
        Mismatch: the profile is another one.
    """
    if profile is not None and digest(profile) != plan.profile_digest:
        raise Mismatch(
            f"the plan was made from the profile with digest {plan.profile_digest[:12]}, this one has {digest(profile)[:12]}",
            hint="give the profile that the plan was made from, or plan again",
        )
    if profile is not None:
        profile = profile.at(plan.microbatch_size)
        planned, known = {name for stage in plan.stages for name in stage.layers}, {layer.name for layer in profile.layers}
        if planned != known:
            raise Mismatch(f"the plan's stages have {len(planned)} layers, the profile {len(known)}: {min(planned ^ known)!r} is only in "
                           "one of them", hint="plan again: the plan was changed by hand")
    if profile is None:
        shares = [1 / 3] * len(plan.stages)
        sent = [(size, size) for size in _cut_bytes_of_loads(plan)]
    else:
        shares = _forward_shares(plan, profile)
        sent = _cut_bytes(plan, profile)
    speeds = {path: kind.speed for path, kind in plan.cluster.devices()}
    stages = []
    for stage, predicted, share, (activation, gradient) in zip(plan.stages, plan.predicted.stages, shares, sent, strict=True):
        r = len(stage.devices)
        slowest = min(speeds[device] for device in stage.devices)  # the plan's times are those of the slowest replica
        slower = [slowest / speeds[device] for device in stage.devices]
        compute_us = predicted.compute_us * r
        # When recomputing, the backward begins with the forward again: 1 + 1 + b in place of 1 + b.
        forward_us = compute_us * (share / (1 + share) if stage.recompute else share)
        update_us = predicted.update_us * plan.batch_microbatches
        ring = ring_bytes(predicted.memory.gradients_bytes, r, plan.batch_microbatches) * plan.batch_microbatches
        stages.append(StageWorkload(
            forward_us=tuple(forward_us * factor for factor in slower),
            backward_us=tuple((compute_us - forward_us) * factor for factor in slower),
            update_us=tuple(update_us * factor for factor in slower),
            ring_bytes=ring,
            activation_bytes=activation,
            gradient_bytes=gradient,
        ))
    assumptions = () if profile is not None else (
        "a backward takes twice its forward", "a gradient is as large as its activation")
    return Workload(tuple(stages), assumptions)


def _forward_shares(plan: Plan, profile: Profile) -> list[float]:
    """The forward's share of each stage's forward and backward."""
    layers = {layer.name: layer for layer in profile.layers}
    shares = []
    for stage in plan.stages:
        forward_us = math.fsum(layers[name].forward_us for name in stage.layers)
        both_us = forward_us + math.fsum(layers[name].backward_us for name in stage.layers)
        shares.append(forward_us / both_us if both_us > 0 else 1 / 3)
    return shares


def _cut_bytes(plan: Plan, profile: Profile) -> list[tuple[float, float]]:
    """(activation, gradient) bytes of the cut after each stage; a tensor that passes over stages is relayed by each."""
    stage_of = {name: k for k, stage in enumerate(plan.stages) for name in stage.layers}
    sent = [[0.0, 0.0] for _ in plan.stages]
    for tensor in profile.tensors:
        source = stage_of[profile.layers[tensor.source].name]
        last = max(stage_of[profile.layers[consumer].name] for consumer in tensor.consumers)
        for k in range(source, last):
            sent[k][0] += tensor.forward_bytes
            sent[k][1] += tensor.gradient_bytes
    return [(activation, gradient) for activation, gradient in sent]


def _cut_bytes_of_loads(plan: Plan) -> list[float]:
    """Bytes of the cut after each stage, from the load of the devices' own links."""
    loads = {link.link: link.load_bytes for link in plan.predicted.links}
    before, sizes = 0.0, []
    for stage, predicted in zip(plan.stages, plan.predicted.stages, strict=True):
        r = len(stage.devices)
        ring = ring_bytes(predicted.memory.gradients_bytes, r, plan.batch_microbatches)
        carried = (loads.get(stage.devices[0], 0.0) - ring) * r
        before = max(0.0, carried - before)
        sizes.append(before)
    return [*sizes[:-1], 0.0]
