"""Plans made by hand: stage times and cut sizes in, a plan and its profile out, without the planner's search.

The predictions are computed here from the formulas of the documents, not by :mod:`planner.cost`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.spec.cluster import Cluster
from planner.spec.files import digest, document_text, parse_document
from planner.spec.plan import LinkPrediction, Memory, Plan, Policy, Prediction, SolverReport, StagePlan, StagePrediction
from planner.spec.profile import Layer, Profile, Tensor
from planner.spec.schedule import default_in_flight
from tests.planner.instances import layer, profile


def stage_layer(index: int, forward_us: float, backward_us: float, *, update_us: float = 0.0, parameter_bytes: int = 0,
                saved_bytes: int = 0) -> Layer:
    """The one layer of a stage."""
    return layer(f"layer{index}", forward_us=forward_us, backward_us=backward_us, update_us=update_us,
                 parameter_bytes=parameter_bytes, saved_bytes=saved_bytes)


def plan_of(
    layers: Sequence[Layer], cluster: Cluster, *, replicas: Sequence[int] | None = None, cuts: Sequence[tuple[int, int]] | None = None,
    batch: int | None = None, extra: int = 0, in_flight: Sequence[int] | None = None, policy: Policy = "stash",
    devices: Sequence[Sequence[str]] | None = None, recompute: bool = False,
) -> tuple[Plan, Profile]:
    """A stage a layer; ``cuts[k]`` are the activation and gradient bytes after stage k; devices in tree order unless given.

    The all-reduce and links are predicted for equal links of equal devices without anything shared above them.
    """
    n = len(layers)
    counts = tuple(replicas or (1,) * n)
    sizes = list(cuts or [(0, 0)] * (n - 1))
    batch = batch or math.lcm(*counts)
    depths = tuple(in_flight or default_in_flight(counts, extra))
    model = profile(list(layers), [Tensor(f"t{k}", k, (k + 1,), *size) for k, size in enumerate(sizes)])
    model = parse_document(Profile, document_text(model), source="a test")  # 100 becomes 100.0, as in a file
    names, kinds = zip(*cluster.devices(), strict=True)
    speed = {name: kind.speed for name, kind in cluster.devices()}
    if devices is None:
        starts = [sum(counts[:k]) for k in range(n)]
        devices = [names[start:start + r] for start, r in zip(starts, counts, strict=True)]
    stages, predicted, links = [], [], []
    edges = [(0, 0), *sizes, (0, 0)]
    bandwidth, latency_us = leaf_link(cluster)
    for k, r in enumerate(counts):
        one, slowest = layers[k], min(speed[name] for name in devices[k])
        compute_us = (one.forward_us * (2 if recompute else 1) + one.backward_us) / slowest / r
        ring = 2 * (r - 1) / r * one.parameter_bytes
        allreduce_us = (ring / bandwidth * 1e6 + 2 * (r - 1) * 2 * latency_us) / batch if r > 1 else 0.0
        versions = math.ceil((depths[k] - 1) * r / batch) + 1
        activations = (one.saved_bytes + edges[k][0]) * depths[k]
        memory = Memory(one.parameter_bytes * versions, one.parameter_bytes, 0, activations, 0)
        stages.append(StagePlan((one.name,), tuple(devices[k]), depths[k], recompute))
        predicted.append(StagePrediction(compute_us, one.update_us / slowest / batch, allreduce_us, 0.0, memory, kinds[0].memory_bytes))
        load = max(edges[k][0] + edges[k + 1][1], edges[k + 1][0] + edges[k][1]) / r + ring / batch
        links += [LinkPrediction(name, load, load / bandwidth * 1e6) for name in devices[k] if load > 0]
    times = {f"stage {k}": stage.microbatch_us for k, stage in enumerate(predicted)}
    times |= {f"link {link.link}": link.microbatch_us for link in links}
    slowest_name = max(times, key=lambda name: times[name])
    plan = Plan(
        command="pipedream plan profile.json", model=model.model, job=None, fingerprint=model.fingerprint, profile_digest=digest(model),
        estimated=False, microbatch_size=model.microbatch_size, policy=policy, batch_microbatches=batch, stages=tuple(stages),
        predicted=Prediction(times[slowest_name], None, slowest_name, tuple(predicted), tuple(links), ()),
        solver=SolverReport("by hand", "feasible", 0.0, 1.0, ""), cluster=cluster,
    )
    return plan, model


def leaf_link(cluster: Cluster) -> tuple[float, float]:
    """Bandwidth and latency of the devices' own links, taken to be equal."""
    nodes = cluster.nodes
    while nodes[0].children:
        nodes = nodes[0].children
    return nodes[0].link.bandwidth_bytes_per_s, nodes[0].link.latency_us
