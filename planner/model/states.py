"""Which cut states of a profile's graph are searched: all of them where they are few, otherwise good ones.

Where a graph has too many, the states come from :mod:`planner.model.wide`: those that trade the compute before a
cut best against the bytes that cross it. If these are too many still, the compute is divided into equal shares,
and in each share the states are kept that the fewest bytes cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.model.ideals import CutStates, closed_under, edges_of, enumerate_ideals, predecessor_masks
from planner.spec.profile import Profile

if TYPE_CHECKING:
    from planner.model.wide import Wide

__all__ = ["MOST_SEARCHED", "Searched", "states_of"]

MOST_SEARCHED = 600  # states of a wide graph; the stages between them grow with the square
MOST_OF_A_CHAIN = 2500  # states of a graph that has about as many as layers
_A_SHARE = 4  # states that are kept where the compute is about the same

Floats = npt.NDArray[np.float64]


class Searched(NamedTuple):
    """``restricted`` says in words what was left out, and is empty when nothing was; ``wide`` then bounds what it can cost."""

    states: CutStates
    restricted: str
    wide: Wide | None


def states_of(profile: Profile, most: int | None = None, deadline: float | None = None) -> Searched:
    """The states to search, at most so many. Layers that must be in one stage are never on two sides of a cut.

    A wide graph is not analysed beyond ``deadline``; then there are only the cuts of the order of execution.
    """
    n = len(profile.layers)
    chosen = MOST_SEARCHED if most is None else most
    if most is None:
        most = min(max(MOST_SEARCHED, 3 * n // 2), MOST_OF_A_CHAIN)
    predecessors = predecessor_masks(n, edges_of(profile))
    groups = [sum(1 << layer for layer in tied.layers) for tied in profile.tied if tied.one_stage]
    found = enumerate_ideals(predecessors, most if not groups else 8 * most)
    if found is not None and len(closed := closed_under(found, groups)) <= most:
        return Searched(CutStates(n, tuple(closed), complete=True), "", None)
    wide = _analysed(profile, deadline)
    prefixes = {(1 << count) - 1 for count in range(n + 1)}
    pool = closed_under(sorted(prefixes.union(wide.states if wide else ()), key=_order), groups)
    states = _fewest_crossing(profile, CutStates(n, tuple(pool), complete=False), chosen)
    return Searched(states, f"cuts behind other sets of layers than {len(states)} chosen ones, of more than {most} that there are", wide)


def _order(mask: int) -> tuple[int, int]:
    return mask.bit_count(), mask


def _analysed(profile: Profile, deadline: float | None) -> Wide | None:
    """None where HiGHS, which it asks thousands of questions, is not installed, or there is no time."""
    try:
        from planner.model.wide import wide_of
    except ModuleNotFoundError:
        return None
    return wide_of(profile, deadline)


def _fewest_crossing(profile: Profile, pool: CutStates, most: int) -> CutStates:
    """States that few bytes cross, spread over the model's compute."""
    if len(pool) <= most:
        return pool
    compute_us, crossing = _measured(profile, pool)
    share = np.floor(compute_us / (compute_us[-1] or 1.0) * (most // _A_SHARE)).astype(np.int64)
    kept = {0, len(pool) - 1}
    cheapest = np.argsort(crossing, kind="stable").tolist()  # what is left of the number goes to these
    for state in (*_spread(share, crossing, _A_SHARE), *cheapest):
        if len(kept) < most:
            kept.add(state)
    return CutStates(pool.layer_count, tuple(pool.masks[state] for state in sorted(kept)), complete=False)


def _spread(share: npt.NDArray[np.int64], crossing: Floats, each: int) -> list[int]:
    """Of each share the states with the least crossing, the cheapest of all shares first."""
    order = np.lexsort((crossing, share))
    first = np.searchsorted(share[order], share[order])  # where the share of each begins
    rank = np.arange(len(order)) - first
    chosen: list[int] = order[np.argsort(rank, kind="stable")][: int((rank < each).sum())].tolist()
    return chosen


def _measured(profile: Profile, pool: CutStates) -> tuple[Floats, Floats]:
    """Compute before each state, and bytes that cross it."""
    holds = pool.holds()
    compute_us, crossing = np.zeros(len(pool)), np.zeros(len(pool))
    for row, layer in zip(holds, profile.layers, strict=True):
        compute_us += row * (layer.forward_us + layer.backward_us)
    for tensor in profile.tensors:
        users: Sequence[int] = tensor.consumers
        crossing += (holds[tensor.source] & ~holds[list(users)].all(axis=0)) * float(tensor.forward_bytes + tensor.gradient_bytes)
    return compute_us, crossing
