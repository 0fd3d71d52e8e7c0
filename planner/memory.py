"""Bytes that one replica of a stage holds at its peak.

With d microbatches in flight and batches of A microbatches dealt to r replicas, a replica runs
a = A / r microbatches of each batch. How many weight versions live at once, by policy:

``stash``     a forward of the replica's q-th microbatch follows the backward of its (q - d)-th, so
              it uses version floor((q - d + 1) / a). Those in flight, q-d+1 .. q, use the versions
              of d consecutive whole numbers divided by a: at most ceil((d - 1) / a) + 1 distinct
              ones, and the newest is among them. For A = r that is d; a last stage has one. ::

                  d = 3, a = 2    q        0 1 2 3 4 5 6 7
                                  version  0 0 0 1 1 2 2 3     three of them span 2 versions

``vertical``  a microbatch uses at every stage the version it met at stage 0, so every stage keeps
              what stage 0 may still ask for: ceil(r_0 (d_0 - 1) / A) + 1.
``2bw``       two: the newest and the one before it.
``flush``     one, as the pipeline is empty at every update; then at most a microbatches are in flight.
``latest``    one, overwritten under the microbatches in flight.

:mod:`planner.spec.schedule` runs the same rules operation by operation; the tests compare.
"""

from __future__ import annotations

from planner.model.graph import Chain
from planner.spec.plan import Memory, Policy

__all__ = ["copies_weights", "depth_within_batch", "live_versions", "replica_memory"]


def live_versions(policy: Policy, replicas: tuple[int, ...], in_flight: tuple[int, ...], batch_microbatches: int, stage: int) -> int:
    """Weight versions that a replica of ``stage`` holds at most, the newest included."""
    if policy == "stash":
        return stashed_versions(replicas[stage], in_flight[stage], batch_microbatches)
    if policy == "vertical":
        return stashed_versions(replicas[0], in_flight[0], batch_microbatches)
    return 2 if policy == "2bw" else 1


def stashed_versions(replicas: int, in_flight: int, batch_microbatches: int) -> int:
    """``ceil((d - 1) / a) + 1`` with a = A / r.

    >>> stashed_versions(1, 3, 1), stashed_versions(1, 3, 2), stashed_versions(2, 1, 2)
    (3, 2, 1)
    """
    return -(-(in_flight - 1) * replicas // batch_microbatches) + 1


def depth_within_batch(policy: Policy, in_flight: int, replicas: int, batch_microbatches: int) -> int:
    """Microbatches of a replica that really are in flight: with ``flush`` never more than its share of a batch."""
    return min(in_flight, batch_microbatches // replicas) if policy == "flush" else in_flight


def copies_weights(policy: Policy, versions: int) -> bool:
    """Whether an update first copies the weights, because an older version stays alive.

    Optimizers step in place, so with ``2bw`` too: the newest version serves the batch in flight, and its copy,
    written over the version that nobody needs any more, is stepped.
    """
    return policy in ("stash", "vertical", "2bw") and versions > 1


def replica_memory(chain: Chain, first: int, last: int, *, in_flight: int, versions: int, recompute: bool = False) -> Memory:
    """Memory of one replica of the stage [first, last).

    Activations are what its layers save for backward and the tensors it received, for every
    microbatch in flight; the workspace is that of its hungriest layer. A stage that recomputes keeps
    the received tensors only, and saves for one microbatch at a time, the one whose backward runs.
    """
    parameters = chain.parameter_bytes[last] - chain.parameter_bytes[first]
    saved = chain.saved_bytes[last] - chain.saved_bytes[first]
    return Memory(
        weights_bytes=parameters * versions + chain.buffer_bytes[last] - chain.buffer_bytes[first],
        gradients_bytes=parameters,
        optimizer_bytes=chain.optimizer_bytes[last] - chain.optimizer_bytes[first],
        activations_bytes=chain.forward_bytes[first] * in_flight + saved * (1 if recompute else in_flight),
        workspace_bytes=chain.workspace(first, last),
    )
