"""The model as the planner sees it: layers in execution order and what crosses each cut.

Cut c lies before layer c; stage [first, last) is bounded by the cuts ``first`` and ``last``. A
tensor that skips stages is relayed by each of them, so it crosses every cut between its source and
its last consumer once, forward, and its gradient crosses the same cuts once, backward::

    layers        0   1   2   3          tensor 0 -> {1, 3}: crosses cuts 1, 2 and 3
    cuts      0 | 1 | 2 | 3 | 4

Data inputs cross nothing: each worker reads its own from the data source.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from planner.spec.profile import Profile

__all__ = ["Chain", "chain_of"]


@dataclass(frozen=True)
class Chain:
    """Prefix sums over the layers, so that any interval of layers is measured in constant time.

    A tuple of sums has ``layer_count + 1`` entries; ``forward_bytes`` and ``gradient_bytes`` are per
    cut, 0 at both ends. ``allowed_cuts`` are the cuts where stages may be separated, with both ends.
    """

    names: tuple[str, ...]
    compute_us: tuple[float, ...]  # forward and backward
    update_us: tuple[float, ...]
    copy_us: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]  # of each layer, not summed
    forward_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    allowed_cuts: tuple[int, ...]

    @property
    def layer_count(self) -> int:
        return len(self.names)

    def intervals(self) -> list[tuple[int, int]]:
        """Every stage [first, last) that may be a stage."""
        return list(itertools.combinations(self.allowed_cuts, 2))


def chain_of(profile: Profile) -> Chain:
    """The chain of the profile's layers.

    The layers of a tied parameter stay in one stage, so that its gradients are summed and its one
    update is kept on one device: no cut lies between the first and the last of them.
    """
    layers, n = profile.layers, len(profile.layers)
    forward, gradient = [0] * (n + 1), [0] * (n + 1)
    for tensor in profile.tensors:
        for cut in range(tensor.source + 1, tensor.consumers[-1] + 1):
            forward[cut] += tensor.forward_bytes
            gradient[cut] += tensor.gradient_bytes
    forbidden = {cut for tied in profile.tied for cut in range(tied.layers[0] + 1, tied.layers[-1] + 1)}
    return Chain(
        names=tuple(layer.name for layer in layers),
        compute_us=_sums([layer.forward_us + layer.backward_us for layer in layers]),
        update_us=_sums([layer.update_us for layer in layers]),
        copy_us=_sums([layer.copy_us for layer in layers]),
        parameter_bytes=_sums([layer.parameter_bytes for layer in layers]),
        buffer_bytes=_sums([layer.buffer_bytes for layer in layers]),
        optimizer_bytes=_sums([layer.optimizer_bytes for layer in layers]),
        saved_bytes=_sums([layer.saved_bytes for layer in layers]),
        workspace_bytes=tuple(layer.workspace_bytes for layer in layers),
        forward_bytes=tuple(forward),
        gradient_bytes=tuple(gradient),
        allowed_cuts=tuple(cut for cut in range(n + 1) if cut not in forbidden),
    )


def _sums(values: list) -> tuple:  # type: ignore[type-arg]  # whole numbers stay whole, so byte counts are exact
    return tuple(itertools.accumulate(values, initial=0))
