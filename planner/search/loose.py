"""A lower bound for many scenarios at once: of a stage only the fewest devices that reach a time, in closed form.

:class:`planner.search.bound.Bound` looks at every replica count of every stage, for one batch. Here scenarios are relaxed to
one: once-a-batch costs are divided by the longest batch of them all, and every replica count that one of them admits
is admitted. With replicas on equal devices and links, and batches of A microbatches::

    stage(r) = a / r + k + c r        a = C - 2 P / bandwidth / A      smallest r with stage(r) <= T:
    link(r)  = b / r + d              k, c, b, d likewise              a root of a quadratic

A *tier* is a range of replica counts for which devices and links are alike (more replicas may need slower ones).
Memory asks for more replicas where many devices follow, as each holds 1 + ceil(u / r) microbatches in flight.
Where this needs more devices than there are, no plan of any of the scenarios is within T. Where devices differ in
speed each has a *price*, that of its speed, and what is least is the sum of prices: a stage takes fewer fast
devices or more slow ones, and all there are have so many of each only. Exact multiples,
numbers of stages and pins are left out.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planner.hardware.topology import Site
from planner.search.problem import Problem, Scenario
from planner.search.stage_arrays import Ints, StageArrays, least_before, stage_arrays
from planner.search.work import is_late

__all__ = ["Kept", "Loose"]

Floats = npt.NDArray[np.float64]
NEVER = 1 << 40  # devices of a stage that no number makes fast enough
MANY = 5_000  # stages; fewer are not worth narrowing
NARROWS = 0.98  # how much shorter a time must be for the stages to be narrowed again
_WHOLE = 1 << 60  # numbers up to this are exact in an array
_FINEST = 1000  # price of the fastest device where there are others
_SLACK = 1e-9  # relative: what rounding may cost, given away


class _Way(NamedTuple):
    """Replica counts from ``least`` to ``most`` on sites that differ in nothing else, recomputing or not."""

    site: Site
    price: int  # of a device
    least: int
    most: int
    compute_us: Floats  # of the stages, on such a device
    once_us: Floats  # once a batch, but for the all-reduce
    left_bytes: Any  # for weight versions and activations; None where memory is unlimited
    each_bytes: Any  # for each microbatch in flight
    again: bool  # recomputing, where the way before it is the same without


class _Range(NamedTuple):
    """The fewest replicas with which each stage is fast enough, and the most."""

    least: Ints
    most: Ints


class Kept(NamedTuple):
    """Stages that plans within a time may have, as indices of :class:`planner.search.stage_arrays.StageArrays`."""

    rows: Ints
    before: Ints  # for each cut, the least price of the stages before it


class Loose:
    """The fewest devices of a path of stages within a time, for one scenario or several.

    ``kept`` are the stages to look at; None: all. Then times must be within that for which they were kept.
    ``deadline`` is a :func:`time.monotonic` from which bounds are no longer improved.
    """

    def __init__(self, problem: Problem, scenarios: Sequence[Scenario], sites: list[Site], kept: Kept | None = None,
                 deadline: float | None = None) -> None:
        self.problem, self.scenarios, self.sites, self.deadline = problem, scenarios, sites, deadline
        self.longest, self.shortest = (min(select(s.batch_microbatches for s in scenarios), _WHOLE) for select in (max, min))
        self.max_devices = max(s.max_devices for s in scenarios)
        speeds = sorted((place.device_type.speed for place in problem.topology.places for _ in range(min(place.count, self.max_devices))),
                        reverse=True)
        self._prices = {speed: max(1, round(speed / speeds[0] * _FINEST)) if speeds[-1] < speeds[0] else 1 for speed in speeds}
        self._budget = sum(self._prices[speed] for speed in speeds[:self.max_devices])
        self._dearest = self._prices[speeds[0]]
        versions = [s.vertical_versions for s in scenarios if s.vertical_versions is not None]
        self._vertical = min(versions) if len(versions) == len(scenarios) else None
        most = min(problem.max_replicas, self.max_devices, len(sites))
        counts = _admitted(scenarios, most)
        self._next = np.full(most + 2, NEVER, dtype=np.int64)  # the next admitted count from each number on
        self._next[counts] = counts
        self._next = np.minimum.accumulate(self._next[::-1])[::-1]
        stages = stage_arrays(problem.chain)
        self.kept = np.arange(len(stages.first)) if kept is None else kept.rows
        self._before = np.zeros(problem.chain.end + 1, dtype=np.int64) if kept is None else kept.before
        self._stages = stages if kept is None else stages.some(kept.rows)
        self._first, self._last = self._stages.first, self._stages.last
        self._parameters, self._busier = self._stages.sizes, self._stages.busier
        self._begins: list[int] = np.searchsorted(self._first, np.arange(problem.chain.end + 2)).tolist()
        self._ways = [way for speed in self._prices for way in self._ways_of(
            self._stages, [sites[r - 1]._replace(speed=speed) for r in counts.tolist() if speeds[r - 1] >= speed])]
        self._limited = any(way.left_bytes is not None for way in self._ways)
        self._known: tuple[float, list[_Range], Ints, Ints] | None = None

    def _ways_of(self, stages: StageArrays, sites: list[Site]) -> list[_Way]:
        problem, ways = self.problem, []
        updates_us = stages.updates_us(problem, self.scenarios[0])  # the same in all
        for _, group in itertools.groupby(sites, key=lambda site: site._replace(replicas=0)):
            run = list(group)
            site = run[0]
            own_us = stages.compute_us / site.speed
            once_us = updates_us / site.speed
            if problem.policy == "flush":
                everybody_us = problem.chain.compute_us[problem.chain.end] / problem.topology.fastest
                once_us = once_us + np.maximum(everybody_us - own_us, 0.0)
            for recompute in problem.recompute_choices:
                compute_us = own_us + stages.forward_us / site.speed if recompute else own_us
                left, each = None, None
                if site.memory_bytes is not None:
                    fixed, saved, received = stages.parts_bytes()
                    left = site.memory_bytes - fixed - (saved if recompute else 0)
                    each = received if recompute else received + saved
                again = recompute and len(problem.recompute_choices) > 1
                ways.append(_Way(site, self._prices[site.speed], run[0].replicas, run[-1].replicas, compute_us, once_us, left, each, again))
        return ways

    def _range(self, way: _Way, time_us: float) -> _Range:
        """The counts with which each stage costs at most ``time_us``, but for what is admitted; NEVER where there is none."""
        site, batch = way.site, self.longest
        ring_us = 2e6 / site.ring_bandwidth_bytes_per_s / batch * self._parameters
        growth_us = 2 * site.ring_latency_us / batch
        room_us = time_us - way.once_us / batch - ring_us + growth_us
        shrinks_us = way.compute_us - ring_us
        ring_bytes = 2.0 / batch * self._parameters
        shrinks_bytes, link_bytes = self._busier - ring_bytes, time_us * site.device_bandwidth_bytes_per_s / 1e6
        least, stage_most = _between(shrinks_us, room_us, growth_us)
        link_least, link_most = _between(shrinks_bytes, link_bytes - ring_bytes, 0.0)
        least = np.maximum(np.maximum(least, link_least) * (1 - _SLACK), way.least)
        most: Ints = np.minimum(np.minimum(stage_most, link_most) * (1 + _SLACK), way.most).astype(np.int64)
        alone_us = way.compute_us + way.once_us / batch  # where more replicas only cost more, one must do
        most[((shrinks_us <= 0) & (alone_us > time_us)) | ((shrinks_bytes <= 0) & (self._busier > link_bytes))] = 0
        count = self._next[np.ceil(np.minimum(least, way.most + 1)).astype(np.int64)]
        return _Range(np.where(count <= most, count, NEVER), most)

    def fewest_devices(self, time_us: float) -> int | None:
        """Of a relaxed plan within ``time_us``; None when there is none on the devices there are."""
        least = int(self._to_end(time_us)[2][0])
        return -(-least // self._dearest) if least <= self._budget else None

    def _to_end(self, time_us: float) -> tuple[list[_Range], Ints, Ints]:
        """By way, the replicas of each stage; the least price of each stage; and of all stages after each cut."""
        if self._known is None or self._known[0] != time_us:
            ranges = [self._range(way, time_us * (1 + _SLACK)) for way in self._ways]
            prices = np.full(len(self.kept), NEVER, dtype=np.int64)
            for way, one in zip(self._ways, ranges, strict=True):
                np.minimum(prices, one.least * way.price, out=prices)
            self._known = (time_us, ranges, prices, self._reached(ranges, prices))
        return self._known[1:]

    def _reached(self, ranges: list[_Range], prices: Ints) -> Ints:
        """Where memory is limited, ``prices`` become those of what a stage needs with the fewest devices after it."""
        end = self.problem.chain.end
        reached = np.full(end + 1, NEVER, dtype=np.int64)
        reached[end] = 0
        for cut in range(end - 1, -1, -1):
            part = slice(self._begins[cut], self._begins[cut + 1])
            if part.start == part.stop:
                continue
            after = reached[self._last[part]]
            if self._limited:
                prices[part] = self._needed(ranges, after, part)
            least = int((prices[part] + after).min())
            if least <= self._budget - self._before[cut]:
                reached[cut] = least
        return reached

    def _needed(self, ranges: list[_Range], after: Ints, part: slice) -> Ints:
        """The least price of stages when so much follows, over all ways; recomputing is looked at where memory binds without it."""
        devices = np.minimum(-(-after // self._dearest), self.max_devices)  # at least so many follow
        needed = np.full(len(after), NEVER, dtype=np.int64)
        everything = np.arange(part.start, part.stop)
        binding = everything[:0]  # stages of the way before that memory makes dearer
        for way, one in zip(self._ways, ranges, strict=True):
            rows = binding if way.again else everything
            if len(rows) == 0:
                continue
            count, here = one.least[rows], rows - part.start
            found = count * way.price
            if way.left_bytes is not None:
                binding = rows[~self._holds(way, count, devices[here], rows) & (count < NEVER)]
                if len(binding):
                    found[np.searchsorted(rows, binding)] = self._with_memory(way, one, after[binding - part.start], binding)
            needed[here] = np.minimum(needed[here], found)
        return needed

    def _holds(self, way: _Way, count: Ints, devices: Ints, rows: Ints) -> npt.NDArray[np.bool_]:
        """Whether so many replicas hold what is in flight before so many devices."""
        room = way.left_bytes[rows] - self._stages.parameters[rows] * self._versions(devices)
        held: npt.NDArray[np.bool_] = room >= way.each_bytes[rows] * (-(-devices // count) + 1)
        return held

    def _with_memory(self, way: _Way, fast: _Range, after: Ints, rows: Ints) -> Ints:
        """The price of stages when so much follows: memory may need more replicas than time does."""
        count = fast.least[rows]
        if way.left_bytes is None:
            return count * way.price
        after = np.minimum(-(-after // self._dearest), self.max_devices)  # at least so many devices
        room = way.left_bytes[rows] - self._stages.parameters[rows] * self._versions(after)
        depth = np.where(way.each_bytes[rows] > 0, room // np.maximum(way.each_bytes[rows], 1), np.where(room >= 0, NEVER, 0))  # that fits
        if self.problem.policy == "flush":  # no more than its share of a batch
            shared = np.where(depth > 0, self.shortest // (np.maximum(depth, 0) + 1) + 1, NEVER)
            more = np.where(depth > 1, np.minimum(-(-after // np.maximum(depth - 1, 1)), shared), shared)
        else:
            more = np.where(depth > 1, -(-after // np.maximum(depth - 1, 1)), NEVER)
        more = np.where((after == 0) & (depth > 0), 1, more)
        needed = np.maximum(count, self._next[np.minimum(more, len(self._next) - 1).astype(np.int64)])
        return np.where(needed <= fast.most[rows], needed * way.price, NEVER)

    def _versions(self, after: Ints) -> Ints | int:
        """No fewer weight versions can be live with so many devices after a stage."""
        if self._vertical is not None:
            return self._vertical
        if self.problem.policy == "stash":
            return -(-after // self.longest) + 1
        return 2 if self.problem.policy == "2bw" else 1

    def lowest_us(self, ceiling_us: float, tolerance: float = _SLACK, known_us: float = 0.0) -> tuple[float, float] | None:
        """A time that no plan is below, and one that a relaxed plan has, at most ``tolerance`` above it while there is time.

        ``known_us`` is a lower bound that is known already. None if no relaxed plan is within ``ceiling_us``.
        """
        if self.fewest_devices(ceiling_us) is None:
            return None
        compute_us = self.problem.chain.compute_us[self.problem.chain.end]
        fastest = max(way.site.speed for way in self._ways)
        low_us = max(known_us, compute_us / fastest / self.max_devices * (1 - _SLACK))
        high_us = ceiling_us if ceiling_us < np.inf else max(low_us, 1e-6)
        while ceiling_us == np.inf and self.fewest_devices(high_us) is None:
            low_us, high_us = high_us, high_us * 2
        inner, narrowed_us = self, np.inf
        while high_us > low_us * (1 + tolerance) and high_us > 1e-9 and not self.late:
            if high_us < narrowed_us * NARROWS:
                inner, narrowed_us = inner.narrowed(high_us), high_us
            trial_us = (low_us + high_us) / 2
            if inner.fewest_devices(trial_us) is None:
                low_us = trial_us
            else:
                high_us = trial_us
        return low_us, high_us

    @property
    def late(self) -> bool:
        return is_late(self.deadline)

    def path(self, time_us: float) -> list[tuple[int, int, int, bool]]:
        """Stages (first, last, replicas, recompute) of a relaxed plan within ``time_us`` of the least price; [] if there is none."""
        ranges, prices, reached = self._to_end(time_us)
        if reached[0] > self._budget:
            return []
        cut, stages = 0, []
        while cut < self.problem.chain.end:
            part = slice(self._begins[cut], self._begins[cut + 1])
            row = part.start + int(np.argmin(prices[part] + reached[self._last[part]]))
            last = int(self._last[row])
            after = np.array([reached[last]])
            by_way = [int(self._with_memory(way, one, after, np.array([row]))[0]) for way, one in zip(self._ways, ranges, strict=True)]
            index = by_way.index(min(by_way))
            recompute = self.problem.recompute_choices[index % len(self.problem.recompute_choices)]
            stages.append((cut, last, by_way[index] // self._ways[index].price, recompute))
            cut = last
        return stages

    def narrowed(self, time_us: float) -> Loose:
        """The same for times within ``time_us`` only, which it answers faster."""
        if len(self.kept) <= MANY:
            return self
        return Loose(self.problem, self.scenarios, self.sites, self.useful(time_us), self.deadline)

    def useful(self, time_us: float) -> Kept:
        """The stages that some plan within ``time_us`` could contain."""
        _, prices, reached = self._to_end(time_us)
        before = least_before(self._begins, self._last, prices, NEVER)
        return Kept(self.kept[before[self._first] + prices + reached[self._last] <= self._budget], before)


def _between(shrinks: Floats, room: Floats, growth: float) -> tuple[Floats, Floats]:
    """The least and the most r with ``shrinks / r + growth r <= room``; the least is infinite where there is none.

    Where growth is zero, r is from ``shrinks / room`` on, or up to it where both are negative.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        if growth > 0:
            square = room * room - 4 * growth * shrinks
            root = np.sqrt(np.maximum(square, 0.0))
            least = np.where(shrinks > 0, np.where((square >= 0) & (room > 0), 2 * shrinks / (room + root), np.inf), 1.0)
            return least, (room + root) / (2 * growth)
        ratio = shrinks / room
        least = np.where(shrinks > 0, np.where(room > 0, ratio, np.inf), 1.0)
        return least, np.where((shrinks <= 0) & (room < 0), ratio, np.inf)


def _admitted(scenarios: Sequence[Scenario], most: int) -> Ints:
    """The replica counts that one of them admits."""
    counts = np.arange(1, most + 1)
    admitted = np.zeros(most, dtype=np.bool_)
    for multiple, only in {(s.multiple, s.only) for s in scenarios}:
        divides = multiple % counts == 0 if multiple <= _WHOLE else np.array([multiple % r == 0 for r in counts.tolist()])
        admitted |= divides & (counts == only if only is not None else True)
    return counts[admitted]
