"""The same model at another microbatch size, the same cluster with other links: what a sweep plans for."""

from __future__ import annotations

import bisect
import dataclasses
from types import SimpleNamespace
from typing import Any, TypeVar

from planner.spec.cluster import Cluster, Link, Node
from planner.spec.profile import Layer, Profile, Tensor

__all__ = ["with_bandwidth", "with_count", "with_memory", "with_microbatch_size"]

T = TypeVar("T", Layer, Tensor)


def with_microbatch_size(profile: Profile, microbatch_size: int) -> Profile:
    """The profile at another microbatch size: measured where it was, else estimated from the measured sizes nearest to it.

    Times and activations lie on the straight line through two measured sizes; parameters and updates do not change.
    With a single measured size they are taken in proportion, which is too kind to small microbatches: they use a
    device less well.
    """
    if microbatch_size in profile.sizes:
        return profile.at(microbatch_size)
    low, high = _around(profile, microbatch_size)
    share = (microbatch_size - low.microbatch_size) / (high.microbatch_size - low.microbatch_size)

    def line(one: float, other: float) -> float:
        return max(0.0, one + share * (other - one))

    def between(one: T, other: T, *fields: str) -> T:
        values: dict[str, Any] = {field: line(getattr(one, field), getattr(other, field)) for field in fields}
        values = {field: round(value) if field.endswith("_bytes") else value for field, value in values.items()}
        return dataclasses.replace(one, **values)

    layers = tuple(between(one, other, "forward_us", "backward_us", "forward_spread_us", "backward_spread_us", "saved_bytes",
                           "workspace_bytes") for one, other in zip(low.layers, high.layers, strict=True))
    tensors = tuple(between(one, other, "forward_bytes", "gradient_bytes")
                    for one, other in zip(low.tensors, high.tensors, strict=True))
    return dataclasses.replace(profile, microbatch_size=microbatch_size, estimated=True, measured=None, layers=layers, tensors=tensors,
                               other_sizes=())


def _around(profile: Profile, microbatch_size: int) -> tuple[Profile, Profile]:
    """The two measured sizes nearest to one, or nothing at size 0 and the only one."""
    sizes = sorted(profile.sizes)
    if len(sizes) == 1:
        return _of_nothing(profile), profile.at(sizes[0])
    above = min(max(bisect.bisect(sizes, microbatch_size), 1), len(sizes) - 1)
    return profile.at(sizes[above - 1]), profile.at(sizes[above])


def _of_nothing(profile: Profile) -> Any:
    """Layers and tensors of a microbatch without samples."""
    layers = tuple(dataclasses.replace(layer, forward_us=0.0, backward_us=0.0, forward_spread_us=0.0, backward_spread_us=0.0,
                                       saved_bytes=0, workspace_bytes=0) for layer in profile.layers)
    tensors = tuple(dataclasses.replace(tensor, forward_bytes=0, gradient_bytes=0) for tensor in profile.tensors)
    return SimpleNamespace(microbatch_size=0, layers=layers, tensors=tensors)


def with_bandwidth(cluster: Cluster, bandwidth_bytes_per_s: float) -> Cluster:
    """The cluster with this bandwidth on its outermost links: those between servers, or of the devices of a single server."""
    return dataclasses.replace(cluster, nodes=_outermost(cluster.nodes, bandwidth_bytes_per_s))


def _outermost(nodes: tuple[Node, ...], bandwidth_bytes_per_s: float) -> tuple[Node, ...]:
    if len(nodes) == 1 and nodes[0].count == 1 and nodes[0].children:  # nothing is beside it, so its link carries nothing
        return (dataclasses.replace(nodes[0], children=_outermost(nodes[0].children, bandwidth_bytes_per_s)),)
    return tuple(dataclasses.replace(node, link=Link(bandwidth_bytes_per_s, node.link.latency_us)) for node in nodes)


def with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    """The cluster with this memory on every device."""
    kinds = tuple(dataclasses.replace(kind, memory_bytes=memory_bytes) for kind in cluster.device_types)
    return dataclasses.replace(cluster, device_types=kinds)


def with_count(cluster: Cluster, count: int) -> Cluster:
    """The cluster with so many of its outermost nodes, which must be of one kind."""
    (node,) = cluster.nodes
    return dataclasses.replace(cluster, nodes=(dataclasses.replace(node, count=count),))
