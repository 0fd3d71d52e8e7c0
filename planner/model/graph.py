"""The model as the planner sees it: the states in which its graph can be cut, and what crosses there.

A cut state is a set of layers that may stand before a cut (:mod:`planner.model.ideals`); state 0 has none, the
last one all. Stage [first, last) is the layers of state ``last`` that are not in ``first``. In a chain,
state c is the first c layers::

    layers        0   1   2   3          tensor 0 -> {1, 3}: crosses cuts 1, 2 and 3
    states    0 | 1 | 2 | 3 | 4

A tensor that skips stages is relayed by each of them, so it crosses every cut between its source and
its last consumer once, forward, and its gradient crosses the same cuts once, backward. Data inputs
cross nothing: each worker reads its own from the data source.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planner.model.ideals import CutStates
from planner.model.states import Searched, states_of
from planner.spec.profile import Profile

if TYPE_CHECKING:
    from planner.model.wide import Wide

__all__ = ["Chain", "chain_of", "chain_over"]

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Chain:
    """Sums over the layers before each state, so that any stage is measured in constant time.

    ``forward_bytes`` and ``gradient_bytes`` cross the cut at a state, 0 at both ends. ``restricted`` says
    which states were left out, and is empty when none was.
    """

    names: tuple[str, ...]  # of layers
    states: CutStates
    compute_us: tuple[float, ...]  # forward and backward
    forward_us: tuple[float, ...]
    update_us: tuple[float, ...]
    copy_us: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    buffer_bytes: tuple[int, ...]
    optimizer_bytes: tuple[int, ...]
    saved_bytes: tuple[int, ...]
    workspace_bytes: tuple[int, ...]  # of each layer, not summed
    forward_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    restricted: str = ""
    wide: Wide | None = None  # of a graph with states left out: bounds what they could have given

    @property
    def layer_count(self) -> int:
        return len(self.names)

    @property
    def end(self) -> int:
        """The last state, that of all layers."""
        return len(self.states) - 1

    @cached_property
    def most_stages(self) -> int:
        """Stages of the longest pipeline."""
        longest = [0] * len(self.states)
        for first, last in self.intervals():
            longest[last] = max(longest[last], longest[first] + 1)
        return longest[self.end]

    def intervals(self) -> list[tuple[int, int]]:
        """Every stage [first, last), by ``first``."""
        return self._intervals

    @cached_property
    def _intervals(self) -> list[tuple[int, int]]:
        first, last = np.nonzero(self.states.inside())
        return list(zip(first.tolist(), last.tolist(), strict=True))

    def has(self, state: int, layer: int) -> bool:
        """Whether the layer is before the cut."""
        return bool(self.states.masks[state] >> layer & 1)

    def layers(self, first: int, last: int) -> tuple[int, ...]:
        """The layers of the stage [first, last), in execution order."""
        return self.states.layers(first, last)

    def stage_names(self, first: int, last: int) -> tuple[str, ...]:
        """Their names."""
        return tuple(self.names[layer] for layer in self.layers(first, last))

    def workspace(self, first: int, last: int) -> int:
        """The workspace of the hungriest layer of the stage [first, last)."""
        if self.states.nested:
            a, b = self._joined[first], self._joined[last]
            return max(self.workspace_bytes[layer] for layer in self._joining[a:b])
        return int(self._workspaces[first, last])

    @cached_property
    def _joining(self) -> tuple[int, ...]:
        """The layers of a chain in the order in which they join its states."""
        return tuple(layer for state in range(self.end) for layer in self.layers(state, state + 1))

    @cached_property
    def _joined(self) -> tuple[int, ...]:
        """How many layers each state has."""
        return tuple(mask.bit_count() for mask in self.states.masks)

    @cached_property
    def _workspaces(self) -> npt.NDArray[np.int64]:
        """Of every stage at once, states by states: the hungriest layers are entered last."""
        result = np.zeros((len(self.states), len(self.states)), dtype=np.int64)
        holds = self.states.holds()
        for layer in sorted(range(self.layer_count), key=lambda layer: self.workspace_bytes[layer]):
            if self.workspace_bytes[layer]:
                result[~holds[layer][:, None] & holds[layer][None, :]] = self.workspace_bytes[layer]
        return result


def chain_of(profile: Profile, most_states: int | None = None, deadline: float | None = None) -> Chain:
    """The states of the profile's graph, at most so many, with what is before them and what crosses there.

    From ``deadline`` on, a :func:`time.monotonic`, good states of a wide graph are no longer looked for.

    Layers that must be in one stage are: no state has some of them and not the others.
    """
    return chain_over(profile, states_of(profile, most_states, deadline))


def chain_over(profile: Profile, searched: Searched) -> Chain:
    """The same over given states."""
    states, restricted, wide = searched
    holds, layers = states.holds(), profile.layers
    return Chain(
        names=tuple(layer.name for layer in layers),
        states=states,
        compute_us=_times(holds, [layer.forward_us + layer.backward_us for layer in layers]),
        forward_us=_times(holds, [layer.forward_us for layer in layers]),
        update_us=_times(holds, [layer.update_us for layer in layers]),
        copy_us=_times(holds, [layer.copy_us for layer in layers]),
        parameter_bytes=_bytes(holds, [layer.parameter_bytes for layer in layers]),
        buffer_bytes=_bytes(holds, [layer.buffer_bytes for layer in layers]),
        optimizer_bytes=_bytes(holds, [layer.optimizer_bytes for layer in layers]),
        saved_bytes=_bytes(holds, [layer.saved_bytes for layer in layers]),
        workspace_bytes=tuple(layer.workspace_bytes for layer in layers),
        forward_bytes=_bytes(_open(holds, profile), [tensor.forward_bytes for tensor in profile.tensors]),
        gradient_bytes=_bytes(_open(holds, profile), [tensor.gradient_bytes for tensor in profile.tensors]),
        restricted=restricted,
        wide=wide,
    )


def _open(holds: Bools, profile: Profile) -> Bools:
    """Which tensors are made before a state and not yet used by all who use them: tensors by states."""
    rows = [holds[tensor.source] & ~holds[list(tensor.consumers)].all(axis=0) for tensor in profile.tensors]
    return np.array(rows, dtype=np.bool_).reshape(len(rows), holds.shape[1])


def _times(holds: Bools, values: list[float]) -> tuple[float, ...]:
    """Sums of what each state holds, in layer order: a chain's are its prefix sums to the last bit."""
    sums = np.zeros(holds.shape[1])
    for row, value in zip(holds, values, strict=True):
        sums += row * value
    return tuple(sums.tolist())


def _bytes(holds: Bools, values: list[int]) -> tuple[int, ...]:
    """The same for whole numbers, which stay whole however large."""
    sums = np.zeros(holds.shape[1], dtype=np.int64 if sum(values) < 2**62 else object)
    for row, value in zip(holds, values, strict=True):
        if value:
            sums += row * value
    return tuple(sums.tolist())
