"""The cost model: microseconds per microbatch in steady state. Columns, oracle and predictions all use it.

A stage of r replicas, batches of A microbatches, slowest device of speed s, P parameter bytes::

    compute    (forward [twice, if it recomputes] + backward) / s / r    each replica runs every r-th microbatch
    update     (optimizer step [+ weight copy]) / s / A       once a batch, on every replica at once
    allreduce  (2 (r-1)/r P / bandwidth + 2 (r-1) latency) / A    a ring over its slowest link, once a batch
    fill       (everybody's forward + backward - its own) / A     with ``flush`` only, see below
    stage      their sum: what of the all-reduce overlaps with the batch's last backward is not counted on

The weights are copied when the policy keeps an older version alive (:func:`planner.memory.copies_weights`).
With ``flush`` a batch takes the stage's time for A microbatches, and once each other stage's for one: the
first microbatch must come to the slowest stage, and the last one must go back. That fill and drain is
counted at the speed of the fastest device and without recomputation.
The latency of an all-reduce is the longest hop's; that of a transfer bounds no throughput.

A link is full duplex, and its load is that of the busier direction, summed over everything that uses
it, over its bandwidth. Per microbatch of the pipeline a replica of a stage moves, over its device's
own link::

    in     (forward bytes of the first cut + gradient bytes of the last cut) / r + ring
    out    (forward bytes of the last cut + gradient bytes of the first cut) / r + ring
    ring   2 (r-1)/r P / A

The link of a server or switch carries the transfers between a replica inside and one outside it
(:meth:`planner.hardware.topology.Topology.crossings`) and the rings that cross it.

The pipeline's time is the largest of all stages and links. Differences from the original PipeDream's
model: it charges ``4 (r-1) P / r`` for an all-reduce with every microbatch, bounds each cut by itself
although links are shared, and leaves memory and the optimizer out.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import NamedTuple

from planner.hardware.topology import Allocation, Site, Topology
from planner.memory import copies_weights, depth_within_batch, live_versions, replica_memory
from planner.model.graph import Chain
from planner.spec.plan import Memory, Policy
from planner.spec.schedule import default_in_flight

__all__ = ["Evaluation", "Stage", "StageCost", "evaluate", "ring_bytes", "stage_cost"]


class Stage(NamedTuple):
    """Layers between the cut states ``first`` and ``last``, on the devices of an allocation."""

    first: int
    last: int
    allocation: Allocation
    recompute: bool = False

    @property
    def replicas(self) -> int:
        return sum(self.allocation)


class StageCost(NamedTuple):
    """Microseconds per microbatch of the pipeline; ``link_us`` is of its devices' own links."""

    compute_us: float
    update_us: float
    allreduce_us: float
    fill_us: float
    link_us: float

    @property
    def stage_us(self) -> float:
        return self.compute_us + self.update_us + self.allreduce_us + self.fill_us

    @property
    def bottleneck_us(self) -> float:
        return max(self.stage_us, self.link_us)


def ring_bytes(parameter_bytes: int, replicas: int, batch_microbatches: int) -> float:
    """What an all-reduce moves over each link of its ring and direction, per microbatch: ``2 (r-1)/r P / A``."""
    return 2 * (replicas - 1) / replicas * parameter_bytes / batch_microbatches


def device_link_bytes(chain: Chain, first: int, last: int, replicas: int, batch_microbatches: int) -> float:
    """Load of one replica's own link in its busier direction, per microbatch of the pipeline."""
    inward = chain.forward_bytes[first] + chain.gradient_bytes[last]
    outward = chain.forward_bytes[last] + chain.gradient_bytes[first]
    parameters = chain.parameter_bytes[last] - chain.parameter_bytes[first]
    return max(inward, outward) / replicas + ring_bytes(parameters, replicas, batch_microbatches)


def stage_cost(chain: Chain, first: int, last: int, site: Site, batch_microbatches: int, *, copies: bool, recompute: bool = False,
               flush_speed: float | None = None) -> StageCost:
    """Cost of the stage [first, last) at ``site``; ``copies``: an update copies the weights first.

    ``flush_speed``: the pipeline drains at every update, and the fastest device has this speed.
    """
    r = site.replicas
    parameters = chain.parameter_bytes[last] - chain.parameter_bytes[first]
    update_us = chain.update_us[last] - chain.update_us[first]
    if copies:
        update_us += chain.copy_us[last] - chain.copy_us[first]
    allreduce_us = 0.0
    if r > 1:
        allreduce_us = 2 * (r - 1) / r * parameters / site.ring_bandwidth_bytes_per_s * 1e6 + 2 * (r - 1) * site.ring_latency_us
    compute_us = chain.compute_us[last] - chain.compute_us[first]
    fill_us = 0.0
    if flush_speed is not None:
        fill_us = max(chain.compute_us[chain.end] / flush_speed - compute_us / site.speed, 0.0)
    if recompute:
        compute_us += chain.forward_us[last] - chain.forward_us[first]
    load = device_link_bytes(chain, first, last, r, batch_microbatches)
    return StageCost(
        compute_us / site.speed / r,
        update_us / site.speed / batch_microbatches,
        allreduce_us / batch_microbatches,
        fill_us / batch_microbatches,
        load / site.device_bandwidth_bytes_per_s * 1e6,
    )


@dataclass(frozen=True)
class Evaluation:
    """What a complete plan costs and needs. Loads are in the busier direction, per microbatch."""

    microbatch_us: float
    bottleneck: str  # "stage 1", "link server0", or "link of stage 1's devices"
    batch_microbatches: int
    in_flight: tuple[int, ...]
    costs: tuple[StageCost, ...]
    memory: tuple[Memory, ...]
    available_bytes: tuple[int | None, ...]
    device_link_bytes: tuple[float, ...]  # of each stage's replicas
    shared_link_bytes: tuple[float, ...]  # of each shared link of the topology
    shared_link_us: tuple[float, ...]

    @property
    def fits(self) -> bool:
        return all(limit is None or need.total_bytes <= limit for need, limit in zip(self.memory, self.available_bytes, strict=True))


def evaluate(chain: Chain, topology: Topology, policy: Policy, stages: tuple[Stage, ...], batch_microbatches: int,
             in_flight: tuple[int, ...] | None = None) -> Evaluation:
    """Time, link loads and memory of a plan, whether or not it fits the devices.

    ``in_flight`` None is the least that keeps every stage busy where transfers are free.
    """
    replicas = tuple(stage.replicas for stage in stages)
    in_flight = tuple(depth_within_batch(policy, depth, r, batch_microbatches)
                      for depth, r in zip(in_flight or default_in_flight(replicas), replicas, strict=True))
    flush_speed = topology.fastest if policy == "flush" else None
    costs, memory, available, device_bytes = [], [], [], []
    for k, (first, last, allocation, recompute) in enumerate(stages):
        site = topology.site(allocation)
        versions = live_versions(policy, replicas, in_flight, batch_microbatches, k)
        costs.append(stage_cost(chain, first, last, site, batch_microbatches, copies=copies_weights(policy, versions),
                                recompute=recompute, flush_speed=flush_speed))
        memory.append(replica_memory(chain, first, last, in_flight=in_flight[k], versions=versions, recompute=recompute))
        available.append(site.memory_bytes)
        device_bytes.append(device_link_bytes(chain, first, last, site.replicas, batch_microbatches))
    shared_bytes = shared_link_loads(chain, topology, stages, batch_microbatches)
    shared_us = tuple(load / link.link.bandwidth_bytes_per_s * 1e6 for load, link in zip(shared_bytes, topology.shared, strict=True))
    times = (
        [(cost.stage_us, f"stage {k}") for k, cost in enumerate(costs)]
        + [(time_us, f"link {link.name}") for time_us, link in zip(shared_us, topology.shared, strict=True)]
        + [(cost.link_us, f"link of stage {k}'s devices") for k, cost in enumerate(costs)]
    )
    slowest_us, bottleneck = max(times, key=lambda entry: entry[0])  # the first of equal ones: a stage before a link
    return Evaluation(slowest_us, bottleneck, batch_microbatches, in_flight, tuple(costs), tuple(memory), tuple(available),
                      tuple(device_bytes), shared_bytes, shared_us)


def shared_link_loads(chain: Chain, topology: Topology, stages: tuple[Stage, ...], batch_microbatches: int) -> tuple[float, ...]:
    """Bytes per microbatch over each shared link in its busier direction."""
    up, down = [0.0] * len(topology.shared), [0.0] * len(topology.shared)
    for first, last, allocation, _ in stages:
        ring = ring_bytes(chain.parameter_bytes[last] - chain.parameter_bytes[first], sum(allocation), batch_microbatches)
        for index in topology.ring(allocation).shared:
            up[index] += ring
            down[index] += ring
    for sender, receiver in itertools.pairwise(stages):
        forward, gradient = chain.forward_bytes[sender.last], chain.gradient_bytes[sender.last]
        for index, (leaving, entering) in enumerate(topology.crossings(sender.allocation, receiver.allocation)):
            up[index] += forward * leaving + gradient * entering
            down[index] += forward * entering + gradient * leaving
    return tuple(max(pair) for pair in zip(up, down, strict=True))
