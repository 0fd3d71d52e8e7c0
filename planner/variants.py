"""The same model at another microbatch size, the same cluster with other links: what a sweep plans for."""

from __future__ import annotations

import dataclasses

from planner.spec.cluster import Cluster, Link, Node
from planner.spec.profile import Profile

__all__ = ["with_bandwidth", "with_microbatch_size"]


def with_microbatch_size(profile: Profile, microbatch_size: int) -> Profile:
    """The profile at another microbatch size, estimated: times and activations in proportion, parameters and updates unchanged.

    That is too kind to small microbatches, which use a device less well.
    """
    if microbatch_size == profile.microbatch_size:
        return profile
    factor = microbatch_size / profile.microbatch_size
    layers = tuple(
        dataclasses.replace(
            layer, forward_us=layer.forward_us * factor, backward_us=layer.backward_us * factor,
            forward_spread_us=layer.forward_spread_us * factor, backward_spread_us=layer.backward_spread_us * factor,
            saved_bytes=round(layer.saved_bytes * factor), workspace_bytes=round(layer.workspace_bytes * factor))
        for layer in profile.layers)
    tensors = tuple(dataclasses.replace(tensor, forward_bytes=round(tensor.forward_bytes * factor),
                                        gradient_bytes=round(tensor.gradient_bytes * factor)) for tensor in profile.tensors)
    return dataclasses.replace(profile, microbatch_size=microbatch_size, estimated=True, measured=None, layers=layers, tensors=tensors)


def with_bandwidth(cluster: Cluster, bandwidth_bytes_per_s: float) -> Cluster:
    """The cluster with this bandwidth on its outermost links: those between servers, or of the devices of a single server."""
    return dataclasses.replace(cluster, nodes=_outermost(cluster.nodes, bandwidth_bytes_per_s))


def _outermost(nodes: tuple[Node, ...], bandwidth_bytes_per_s: float) -> tuple[Node, ...]:
    if len(nodes) == 1 and nodes[0].count == 1 and nodes[0].children:  # nothing is beside it, so its link carries nothing
        return (dataclasses.replace(nodes[0], children=_outermost(nodes[0].children, bandwidth_bytes_per_s)),)
    return tuple(dataclasses.replace(node, link=Link(bandwidth_bytes_per_s, node.link.latency_us)) for node in nodes)
