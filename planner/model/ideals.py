"""Cut states: the sets of layers that may stand before a cut of the layer graph.

A cut of a pipeline has behind it layers whose inputs are all behind it too: an *order ideal* of the
graph. Ideals, sorted by how many layers they hold, are the cut states 0, 1, ..., with the empty one
first and the full one last. A stage is the layers of a state J that are not in a state I inside it,
written [I, J): convex by construction, and a path of states is a pipeline without cycles::

         b            states   0 {}   1 {a}   2 {ab}   3 {ac}   4 {abc}   5 {abcd}
       /   \\
     a       d        stages   [1, 2) = b    [1, 4) = b and c    [2, 4) = c    [2, 3) is none: 2 is not in 3
       \\   /
         c            a chain of n layers has n + 1 states, its cuts

A graph with parallel branches can have exponentially many ideals, so enumeration has a limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.spec.profile import Profile

__all__ = ["MOST_STATES", "CutStates", "closed_under", "edges_of", "enumerate_ideals", "predecessor_masks"]

MOST_STATES = 200_000
Bools = npt.NDArray[np.bool_]


def predecessor_masks(layer_count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """For each layer the bitset of layers that feed it; ``edges`` are (source, consumer) with source < consumer."""
    masks = [0] * layer_count
    for source, consumer in edges:
        masks[consumer] |= 1 << source
    return masks


def edges_of(profile: Profile) -> list[tuple[int, int]]:
    """(source, consumer) of every tensor."""
    return [(tensor.source, consumer) for tensor in profile.tensors for consumer in tensor.consumers]


def enumerate_ideals(predecessors: Sequence[int], limit: int = MOST_STATES) -> list[int] | None:
    """Every order ideal as a bitset, by number of layers and then by value; None when there are more than ``limit``.

    >>> [bin(ideal) for ideal in enumerate_ideals([0, 1, 1])]
    ['0b0', '0b1', '0b11', '0b101', '0b111']
    """
    successors: list[list[int]] = [[] for _ in predecessors]
    for layer, mask in enumerate(predecessors):
        for source in _bits(mask):
            successors[source].append(layer)
    ready = sum(1 << layer for layer, mask in enumerate(predecessors) if mask == 0)
    level = {0: ready}  # ideals of one size, each with the layers that may join it next
    found = [0]
    while level:
        larger: dict[int, int] = {}
        for ideal, ready in level.items():
            for layer in _bits(ready):
                joined = ideal | 1 << layer
                if joined in larger:
                    continue
                next_ready = ready & ~(1 << layer)
                for later in successors[layer]:
                    if predecessors[later] & ~joined == 0:
                        next_ready |= 1 << later
                larger[joined] = next_ready
            if len(found) + len(larger) > limit:
                return None
        found += sorted(larger)
        level = larger
    return found


def closed_under(ideals: Iterable[int], groups: Iterable[int]) -> list[int]:
    """The ideals that hold all or nothing of each group (a bitset): between the members of a group there is no cut."""
    wanted = list(groups)
    return [ideal for ideal in ideals if all(ideal & group in (0, group) for group in wanted)]


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True, eq=False)
class CutStates:
    """The states of a graph of ``layer_count`` layers; ``complete`` when they are all there are.

    ``masks`` are bitsets of layers, by number of layers, the empty set first and the full set last.
    """

    layer_count: int
    masks: tuple[int, ...]
    complete: bool

    def __len__(self) -> int:
        return len(self.masks)

    @cached_property
    def nested(self) -> bool:
        """Whether each state is inside the next: a chain's."""
        return all(small & ~large == 0 for small, large in zip(self.masks, self.masks[1:], strict=False))

    def some(self, weight: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.int64]:
        """At most ``count`` states of a chain from the empty to the full one, about evenly by ``weight`` (of each state)."""
        position = {mask: index for index, mask in enumerate(self.masks)}
        prefixes = [(1 << size) - 1 for size in range(self.layer_count + 1)]
        chain = np.array([position[mask] for mask in prefixes if mask in position])
        wanted = np.searchsorted(weight[chain], np.linspace(0, weight[chain[-1]], count))
        picked: npt.NDArray[np.int64] = chain[np.unique([0, *np.minimum(wanted, len(chain) - 1), len(chain) - 1])]
        return picked

    def layers(self, first: int, last: int) -> tuple[int, ...]:
        """The layers of the stage [first, last), ascending."""
        return tuple(_bits(self.masks[last] & ~self.masks[first]))

    def holds(self) -> Bools:
        """Whether a layer is in a state: layers by states."""
        width = -(-self.layer_count // 8)
        packed = np.frombuffer(b"".join(mask.to_bytes(width, "little") for mask in self.masks), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(len(self), width), axis=1, bitorder="little", count=self.layer_count)
        return np.ascontiguousarray(bits.T.astype(np.bool_))

    def inside(self) -> Bools:
        """Whether state i is strictly inside state j, states by states: whether [i, j) is a stage."""
        width = -(-self.layer_count // 64)
        packed = np.frombuffer(b"".join(mask.to_bytes(8 * width, "little") for mask in self.masks), dtype=np.uint64)
        words = packed.reshape(len(self), width)
        result = np.triu(np.ones((len(self), len(self)), dtype=np.bool_), 1)
        if not self.nested:
            for word in words.T:
                result &= (word[:, None] & ~word[None, :]) == 0
        return result
