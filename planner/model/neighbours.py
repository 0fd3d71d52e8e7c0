"""Cut states near others: where a plan over chosen states is refined layer by layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.model.ideals import CutStates

__all__ = ["around"]


def around(predecessors: Sequence[int], masks: Iterable[int], most: int) -> CutStates:
    """About ``most`` states: those a few layers more or less than ``masks``, the nearest first, with both ends."""
    count, centres = len(predecessors), list(masks)
    successors = [0] * count
    for layer, mask in enumerate(predecessors):
        for source in _bits(mask):
            successors[source] |= 1 << layer
    full = (1 << count) - 1
    found = {0, full}
    for centre in centres:
        near, queue = {centre}, [centre]
        for state in queue:
            if len(near) * len(centres) >= most:
                break
            joining = (state | 1 << layer for layer in _bits(full & ~state) if predecessors[layer] & ~state == 0)
            leaving = (state & ~(1 << layer) for layer in _bits(state) if successors[layer] & state == 0)
            for neighbour in (*joining, *leaving):
                if neighbour not in near:
                    near.add(neighbour)
                    queue.append(neighbour)
        found |= near
    return CutStates(count, tuple(sorted(found, key=lambda mask: (mask.bit_count(), mask))), complete=False)


def _bits(mask: int) -> Iterable[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
