"""Which cut states of a profile's graph are searched: all of them where they are few, otherwise good ones.

Where a graph has too many, candidates are the prefixes of several orders of its layers: the order of
execution, and greedy ones that keep open as few bytes as they can, forward from the data and backward from
the loss. Of these the compute is divided into equal shares, and in each share the states are kept that the
fewest bytes cross; one order is kept nearly whole, so that there is a path through small steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from planner.ideals import CutStates, closed_under, enumerate_ideals, predecessor_masks
from planner.spec.profile import Profile

__all__ = ["MOST_SEARCHED", "states_of"]

MOST_SEARCHED = 600  # states of a wide graph; the stages between them grow with the square
MOST_OF_A_CHAIN = 2500  # states of a graph that has about as many as layers


def states_of(profile: Profile, most: int | None = None) -> tuple[CutStates, str]:
    """The states to search, and in words what was left out ("" when nothing was).

    The layers of a tied parameter are never on two sides of a cut.
    """
    n = len(profile.layers)
    if most is None:
        most = min(max(MOST_SEARCHED, 3 * n // 2), MOST_OF_A_CHAIN)
    predecessors = predecessor_masks(n, [(t.source, consumer) for t in profile.tensors for consumer in t.consumers])
    groups = [sum(1 << layer for layer in tied.layers) for tied in profile.tied]
    found = enumerate_ideals(predecessors, most if not groups else 8 * most)
    if found is not None and len(closed := closed_under(found, groups)) <= most:
        return CutStates(n, tuple(closed), complete=True), ""
    orders = _orders(profile, predecessors)
    prefixes = [closed_under(_prefixes(order), groups) for order in orders]
    kept = _fewest_crossing(profile, prefixes, most)
    return CutStates(n, tuple(sorted(kept, key=lambda mask: (mask.bit_count(), mask))), complete=False), (
        f"cuts at other than {len(kept)} chosen sets of layers, of more than {most} that a cut can be behind")


def _prefixes(order: Sequence[int]) -> list[int]:
    masks = [0]
    for layer in order:
        masks.append(masks[-1] | 1 << layer)
    return masks


def _orders(profile: Profile, predecessors: Sequence[int]) -> list[list[int]]:
    """Orders of the layers that respect the graph."""
    n = len(profile.layers)
    feeds = [[source for source in range(layer) if mask >> source & 1] for layer, mask in enumerate(predecessors)]
    fed: list[list[int]] = [[] for _ in range(n)]
    for layer, sources in enumerate(feeds):
        for source in sources:
            fed[source].append(layer)
    makes = [0] * n
    for tensor in profile.tensors:
        makes[tensor.source] += tensor.forward_bytes + tensor.gradient_bytes
    backward = _greedy(fed, feeds, [0] * n, makes)  # what a layer takes in is open until its source has joined, seen from the end
    return [list(range(n)), _greedy(feeds, fed, makes, [0] * n), backward[::-1]]


def _greedy(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], opens: Sequence[int], shuts: Sequence[int]) -> list[int]:
    """Next is always the layer that leaves the fewest bytes open; ties go to the one that became ready last.

    ``opens`` are the bytes that a layer leaves open until all of ``after`` have come. ``shuts`` are those
    that it closes, which the first of ``after`` opened, for an order from the end.
    """
    waits, left = [len(sources) for sources in before], [len(users) for users in after]
    opened: set[int] = set()
    ready = [layer for layer, count in enumerate(waits) if count == 0]
    order: list[int] = []

    def change(layer: int) -> int:
        grows = opens[layer] if after[layer] else 0
        closes = sum(opens[source] for source in before[layer] if left[source] == 1)
        starts = sum(shuts[user] for user in after[layer] if user not in opened)
        return grows - closes + starts - (shuts[layer] if before[layer] else 0)

    while ready:
        choice = min(range(len(ready)), key=lambda index: (change(ready[index]), -index))
        layer = ready.pop(choice)
        order.append(layer)
        opened.update(after[layer])
        for source in before[layer]:
            left[source] -= 1
        for user in after[layer]:
            waits[user] -= 1
            if waits[user] == 0:
                ready.append(user)
    return order


def _fewest_crossing(profile: Profile, chains: Sequence[Sequence[int]], most: int) -> set[int]:
    """States of the chains that few bytes cross, spread over the model's compute."""
    measured: dict[int, tuple[float, int]] = {}
    for chain in chains:
        measured.update(_measure(profile, chain))
    total_us = max((ahead_us for ahead_us, _ in measured.values()), default=0.0) or 1.0
    full = (1 << len(profile.layers)) - 1
    kept = {0, full}
    for shares, pool in ((most // 4, list(chains[1])), (most // 4, list(measured))):
        best: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for mask in pool:
            ahead_us, crossing = measured[mask]
            best[int(ahead_us / total_us * shares)].append((crossing, mask))
        for entries in best.values():
            kept.update(mask for _, mask in sorted(entries)[:2])
    return kept


def _measure(profile: Profile, chain: Sequence[int]) -> dict[int, tuple[float, int]]:
    """For each state of a chain the compute before it and the bytes that cross it."""
    waiting = {index: len(tensor.consumers) for index, tensor in enumerate(profile.tensors)}
    uses: dict[int, list[int]] = defaultdict(list)
    makes: dict[int, list[int]] = defaultdict(list)
    for index, tensor in enumerate(profile.tensors):
        makes[tensor.source].append(index)
        for consumer in tensor.consumers:
            uses[consumer].append(index)
    result: dict[int, tuple[float, int]] = {}
    ahead_us, crossing, before = 0.0, 0, 0
    for mask in chain:
        joined = mask & ~before
        while joined:
            layer = (joined & -joined).bit_length() - 1
            joined &= joined - 1
            ahead_us += profile.layers[layer].forward_us + profile.layers[layer].backward_us
            crossing += sum(profile.tensors[index].forward_bytes + profile.tensors[index].gradient_bytes for index in makes[layer])
            for index in uses[layer]:
                waiting[index] -= 1
                if waiting[index] == 0:
                    crossing -= profile.tensors[index].forward_bytes + profile.tensors[index].gradient_bytes
        result[mask] = (ahead_us, crossing)
        before = mask
    return result
