"""Graphs with too many cut states to list: good states, and a time that no plan over any states is below.

The layers of a longest path are a spine, c_1 -> c_2 -> ... Every state holds its first q layers for some q,
and then everything that feeds c_q and nothing that c_{q+1} feeds::

    all that feeds c_q   <=   state   <=   all but what c_{q+1} feeds

:mod:`planner.model.min_cuts` says, for each q, how much compute can be before a cut that no more than b bytes
cross, and how little. The stages of a pipeline follow the spine, so a dynamic program over positions and
devices that only asks how much compute *could* be done by then allows all that a real pipeline does::

    done(q, d)   the most of   min( done(p, d - m) + m T,  most compute before a cut at q that m T B bytes may cross )

If the whole cannot be done with the devices there are, no plan reaches T.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from planner.model.min_cuts import Crossing, Frontier, Graph, frontier
from planner.spec.profile import Profile

__all__ = ["Added", "Wide", "wide_of"]

Floats = npt.NDArray[np.float64]
Added = Callable[[int, Floats], Floats]  # (devices, parameter bytes) -> microseconds of all of them together beyond the compute

MOST_POSITIONS = 400  # of the spine; a coarser one is as valid and less sharp
_SMALL_BYTES = 100_000  # tensors below this do not take part in the step in which crossing bytes grow
_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class Wide:
    """The positions on the spine: what every stage between two of them has in any case, and the frontier at each."""

    total_us: float
    least_us: Floats  # compute of all that feeds the spine up to a position
    most_us: Floats  # compute of all that may be before it
    sure_us: Floats  # of what a stage from one position to another has in any case: positions by positions
    sure_bytes: Floats  # parameters, the same
    steps: tuple[tuple[int, int], ...]  # at each position, whose multiples the crossing bytes are, up to a rest below the second
    frontiers: tuple[Frontier, ...]

    @cached_property
    def states(self) -> tuple[int, ...]:
        """All states on the frontiers, each once."""
        return tuple(sorted({mask for one in self.frontiers for mask in one.states}))

    def least_time_us(self, devices: int, bytes_per_us: float, high_us: float, added: Added | None = None,
                      tolerance: float = 1e-4) -> float:
        """A time that no plan is below; ``high_us`` itself where nothing is faster by more than 1e-7 of it."""
        low_us = self.total_us / devices
        trial_us = high_us * (1 - 1e-7)
        while high_us > low_us * (1 + tolerance):
            if self.reaches(trial_us, devices, bytes_per_us, added):
                high_us = trial_us
            else:
                low_us = trial_us if trial_us < high_us * (1 - 1e-6) else high_us
            trial_us = (low_us + high_us) / 2
        return low_us

    def reaches(self, time_us: float, devices: int, bytes_per_us: float, added: Added | None = None) -> bool:
        """Whether ``devices`` might reach ``time_us``, as far as this relaxation can tell.

        At most ``m * time_us * bytes_per_us`` bytes, forward and back together, cross a cut of a stage on m devices;
        the first stage's cut is limited by the second alone. ``added`` is what m devices take beyond their compute.
        """
        count = len(self.frontiers)
        ordered = np.triu(np.ones((count, count), dtype=np.bool_))
        start = np.full(count, -np.inf)
        start[0] = 0.0
        done = [start]
        gains: list[Floats] = []
        limits: list[tuple[Floats, Floats]] = []
        for used in range(1, devices + 1):
            room = m_us - added(used, self.sure_bytes) if added and (m_us := used * time_us) else np.full_like(self.sure_us, used * time_us)
            gains.append(np.where(ordered & (room >= self.sure_us * (1 - _SLACK)), room, -np.inf))
            limits.append(self._between(used * time_us * bytes_per_us))
            best = np.full(count, -np.inf)
            for m in range(1, used + 1):
                before = done[used - m]
                after = ((before if used == m else _within(before, limits[m - 1]))[:, None] + gains[m - 1]).max(axis=0)
                after = _within(np.minimum(after, self.most_us), (self.most_us, self.least_us))
                np.maximum(best, after if used == m else _within(after, limits[m - 1]), out=best)
            done.append(best)
        return max(float(one[-1]) for one in done) >= self.total_us * (1 - _SLACK)

    def _between(self, limit_bytes: float) -> tuple[Floats, Floats]:
        """The most and the least compute before a cut that so many bytes may cross, at each position."""
        step, rest, least_bytes, above, below = self._lines
        crossing = np.floor(limit_bytes / step * (1 + _SLACK)) * step + rest
        allowed = limit_bytes >= least_bytes * (1 - _SLACK)
        most = (above[1] + above[0] * crossing[:, None]).min(axis=1)
        least = (below[1] - below[0] * crossing[:, None]).max(axis=1)
        return np.where(allowed, most, -np.inf), np.where(allowed, least, np.inf)

    @cached_property
    def _lines(self) -> tuple[Floats, Floats, Floats, tuple[Floats, Floats], tuple[Floats, Floats]]:
        """Steps, rests, least bytes, and the lines of all positions as arrays; shorter rows repeat their last."""
        def rows(lines: Sequence[Sequence[tuple[float, float]]]) -> tuple[Floats, Floats]:
            width = max(map(len, lines))
            padded = np.array([[*one, *[one[-1]] * (width - len(one))] for one in lines])
            return padded[:, :, 0], padded[:, :, 1]

        step, rest = np.array(self.steps, dtype=np.float64).T
        return (step, rest, np.array([one.least_bytes for one in self.frontiers]), rows([one.above for one in self.frontiers]),
                rows([one.below for one in self.frontiers]))


def _within(done: Floats, limits: tuple[Floats, Floats]) -> Floats:
    """No more than the most; nothing where even the least is not done."""
    most, least = limits
    return np.where(done >= least * (1 - _SLACK), np.minimum(done, most), -np.inf)


def wide_of(profile: Profile, deadline: float | None = None) -> Wide | None:
    """Analyse a profile's graph; None where that is not done by ``deadline``, a :func:`time.monotonic`."""
    layers, count = profile.layers, len(profile.layers)
    feeds: list[set[int]] = [set() for _ in range(count)]
    for tensor in profile.tensors:
        for consumer in tensor.consumers:
            feeds[consumer].add(tensor.source)
    graph = Graph(
        tuple(layer.forward_us + layer.backward_us for layer in layers),
        tuple(tuple(sorted(sources)) for sources in feeds),
        tuple(Crossing(t.source, t.consumers, t.forward_bytes + t.gradient_bytes) for t in profile.tensors),
    )
    spine = _spine(graph.feeds)
    inner, outer = _sets(graph.feeds, spine)
    least_us, most_us = _sums(graph.compute_us, inner), _sums(graph.compute_us, outer)
    frontiers: list[Frontier] = []
    for a, b, us in zip(inner, outer, least_us.tolist(), strict=True):
        if deadline is not None and time.monotonic() > deadline:
            return None
        frontiers.append(frontier(graph, a, b, us))
    entered = _first(inner)
    missing = {v: len(outer) - 1 - q for v, q in _first([~mask for mask in reversed(outer)], count).items()}
    sure = [(missing[v], entered[v], v) for v in range(count) if v in entered and v in missing]
    return Wide(
        total_us=sum(graph.compute_us),
        least_us=least_us,
        most_us=most_us,
        sure_us=_sure(len(inner), [(p, q, graph.compute_us[v]) for p, q, v in sure]),
        sure_bytes=_sure(len(inner), [(p, q, float(layers[v].parameter_bytes)) for p, q, v in sure]),
        steps=tuple(_step(graph, a, b) for a, b in zip(inner, outer, strict=True)),
        frontiers=tuple(frontiers),
    )


def _spine(feeds: Sequence[Sequence[int]]) -> list[int]:
    """The layers of a path with the most layers, evenly thinned out where it is very long."""
    length, previous = [1] * len(feeds), [-1] * len(feeds)
    for layer, sources in enumerate(feeds):
        for source in sources:
            if length[source] >= length[layer]:
                length[layer], previous[layer] = length[source] + 1, source
    path = [max(range(len(feeds)), key=lambda layer: length[layer])]
    while previous[path[-1]] >= 0:
        path.append(previous[path[-1]])
    path.reverse()
    return path[:: -(-len(path) // MOST_POSITIONS)]


def _sets(feeds: Sequence[Sequence[int]], spine: Sequence[int]) -> tuple[list[int], list[int]]:
    """For each position, what every state has there and what it may have."""
    count = len(feeds)
    above, below = [1 << v for v in range(count)], [1 << v for v in range(count)]
    for layer, sources in enumerate(feeds):
        for source in sources:
            above[layer] |= above[source]
    for layer in reversed(range(count)):
        for source in feeds[layer]:
            below[source] |= below[layer]
    everything = (1 << count) - 1
    inner = [0, *(above[layer] for layer in spine)]
    outer = [*(everything & ~below[layer] for layer in spine), everything]
    return inner, outer


def _first(masks: Sequence[int], count: int | None = None) -> dict[int, int]:
    """For each layer the first of growing masks that has it; ``count`` layers where masks are endless."""
    found: dict[int, int] = {}
    before = 0
    for position, mask in enumerate(masks):
        new = mask & ~before if count is None else mask & ~before & ((1 << count) - 1)
        before |= mask
        while new:
            found[(new & -new).bit_length() - 1] = position
            new &= new - 1
    return found


def _sums(values: Sequence[float], masks: Sequence[int]) -> Floats:
    """Sums over growing sets of layers."""
    added = np.zeros(len(masks))
    for layer, position in _first(masks).items():
        added[position] += values[layer]
    return np.cumsum(added)


def _sure(count: int, entries: Sequence[tuple[int, int, float]]) -> Floats:
    """Sums of what is not yet before position p and surely before position q."""
    result = np.zeros((count, count))
    for p, q, value in entries:
        result[p, q] += value
    summed: Floats = np.cumsum(np.cumsum(result[::-1], axis=0)[::-1], axis=1)
    return summed


def _step(graph: Graph, inner: int, outer: int) -> tuple[int, int]:
    """Of the tensors that may cross here: the greatest common divisor of the large ones, and the sum of the small ones."""
    may_cross = zip(graph.tensors, graph.users, strict=True)
    sizes = [tensor.bytes for tensor, users in may_cross if outer >> tensor.source & 1 and users & ~inner]
    large = [size for size in sizes if size >= _SMALL_BYTES]
    return math.gcd(*large) if large else 1, sum(size for size in sizes if size < _SMALL_BYTES)
