"""A bound that knows places and links: whether stages within a time T can be laid on the devices, link by link.

From the last stage to the first, over the states of :mod:`planner.search.placings`: for every cut and state, the
least load that the stages after it put on each shared link, each link and direction for itself::

    state (cut j, u, q) -- transfer at cut j --> head (u, pattern) -- stage [i, j) --> state (cut i, u + a, pattern)

A state above T on any link is left out. Different stages may be behind the least loads of different links, so what is
possible here may not be: where nothing is left at the first cut there is no plan within T. Beside them each state has the loads of
one way that is real, of those within T the one whose busiest link is least busy: where one is left at the first cut it is a plan.

Besides its places a state has, as in :mod:`planner.search.bound`, the prime powers of the batch that replica counts cover
already and, where their number is fixed, the stages there are. Pins are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.cost import Stage
from planner.search.placings import Placings
from planner.search.problem import Problem, Scenario, covering, prime_powers
from planner.search.stage_arrays import Ints, least_before, stage_arrays
from planner.search.work import Work, is_late

__all__ = ["Linked"]

Floats = npt.NDArray[np.float64]
Booleans = npt.NDArray[np.bool_]
MOST_HEADS = 30_000_000  # of all cuts
MOST_LOOKED = 80_000_000  # steps times links, for one time
_SLACK = 1e-11
_NEVER = 1 << 40


class _Ways(NamedTuple):
    """Of states: the least loads (first), those of one real way (last; infinite without one), and that way's next step."""

    loads_us: Floats  # [n, 2, loads], or [n, 1, loads] where no plan is looked for
    rows: Ints  # the stage that begins there
    steps: Ints
    recompute: Ints
    covered: Ints  # by the stages after it


class Linked:
    """Of one scenario, or of several: then each stage costs what it does with the longest batch that has its replica count.

    ``rows`` are the stages to look at, as in :mod:`planner.search.stage_arrays`; plans have at most ``max_devices``. ``work`` counts
    steps times links.
    """

    def __init__(self, problem: Problem, scenarios: Sequence[Scenario], placed: Placings, rows: Ints, max_devices: int,
                 work: Work, deadline: float | None = None) -> None:
        self.problem, self.placed, self.max_devices, self.work, self.deadline = problem, placed, max_devices, work, deadline
        stages = stage_arrays(problem.chain).some(rows)
        self._first, self._last, self._sizes = stages.first, stages.last, stages.sizes
        self._begins: list[int] = np.searchsorted(self._first, np.arange(problem.chain.end + 2)).tolist()
        powers = prime_powers(scenarios[0].multiple) if len(scenarios) == 1 and scenarios[0].exact else ()
        one_stage = (1 << len(powers)) if problem.stages is not None else 0
        self._wanted = (problem.stages or 0) << len(powers) | (1 << len(powers)) - 1
        self._width = self._wanted + 1
        self._covers = np.array([sum(1 << bit for bit, power in enumerate(powers) if count % power == 0)
                                 for count in placed.counts.tolist()])
        after = (np.arange(self._width)[None, :] | self._covers[:, None]) + one_stage
        self._next = np.where(after <= self._wanted, after, -1)  # by allocation and what is covered after it
        self.too_large = (problem.chain.end + 1) * len(placed.heads) * self._width > MOST_HEADS
        ways: list[list[int]] = []  # the allocations at each site
        costs, limits, replicas, choices = [], [], [], []
        self._ring = np.zeros(problem.topology.device_count + 1)  # by replicas: what of the parameters a ring carries per microbatch
        for site, allocations in placed.sites.items():
            scenario = covering(problem, [one for one in scenarios if one.admits(site.replicas)])
            if scenario is not None and site.replicas <= max_devices:
                self._ring[site.replicas] = 2 * (site.replicas - 1) / site.replicas / scenario.batch_microbatches
                for choice, recompute in enumerate(problem.recompute_choices):
                    costs.append(stages.cost_us(problem, scenario, site, recompute))
                    limits.append(stages.max_after(problem, scenario, site, recompute))
                    replicas.append(site.replicas)
                    choices.append(choice)
                    ways.append(allocations)
        self._way_bounds = np.cumsum([0, *map(len, ways)])
        self._way_allocations = np.array([allocation for way in ways for allocation in way], dtype=np.int64)
        shape = (len(costs), len(rows))
        self._costs, self._limits = np.array(costs).reshape(shape), np.array(limits, dtype=np.int64).reshape(shape)
        self.looked, self._most = 0, MOST_LOOKED  # at so many steps, times links
        self._replicas, self._choices = np.array(replicas, dtype=np.int64), np.array(choices, dtype=np.int64)

    @property
    def unanswered(self) -> bool:
        """Whether the last :meth:`within` was ended by the time, or by the steps it would have taken."""
        return self.looked > self._most or self.work.left < 0 or is_late(self.deadline)

    def within(self, time_us: float, most_looked: int = MOST_LOOKED, *, real: bool = True) -> int | None:
        """The fewest devices of what is left at the first cut; None where nothing is, or where it is :attr:`unanswered`.

        Unless ``real``, no plan is looked for, which takes half as long.
        """
        self._most = self.looked + most_looked
        end, width = self.problem.chain.end, self._width
        allowed = (self._costs <= time_us) & (self._limits >= 0)
        fewest = np.where(allowed, self._replicas[:, None], _NEVER).min(axis=0, initial=_NEVER)
        before = least_before(self._begins, self._last, fewest, _NEVER)
        self._before_ending = np.full(end + 1, _NEVER)  # by cut: the fewest devices of the stages before the one that ends there
        possible = allowed.any(axis=0)
        np.minimum.at(self._before_ending, self._last[possible], before[self._first[possible]])
        self._least = np.full(end + 1, _NEVER)  # by cut: the fewest devices of a state, once they are known
        self._least[end] = 0
        self._states: dict[int, _Ways] = {}
        self._heads = np.full((end + 1, len(self.placed.heads) * width), -1, dtype=np.int32)  # numbers of the heads that are there
        last = self.placed.last_heads
        self._heads[end, last * width] = np.arange(len(last))
        self._head_loads_us = np.zeros((len(last), 1 + real, 2 * self.placed.links))  # of each head, as of a state, with room for more
        self._head_states, self._head_count = np.zeros(len(last), dtype=np.int64), len(last)  # the state after it, among its cut's
        for cut in range(end - 1, -1, -1):
            if before[cut] < _NEVER and not self.unanswered:
                states, ways = self._begin(cut, allowed, int(before[cut]), time_us)
                if len(states):
                    self._states[cut] = ways
                    if cut == 0 or self._transfer(cut, states, ways, time_us):
                        self._least[cut] = self.placed.state_devices[states // width].min()
                        self._devices = self.placed.state_devices[states // width]
        return int(self._least[0]) if self._least[0] < _NEVER else None

    def stages(self) -> tuple[Stage, ...]:
        """A plan that :meth:`within` found, on the fewest devices that it found one on; () if it found none."""
        here, cut = self._states[0], 0
        if here.loads_us.shape[1] == 1:
            return ()
        busiest = here.loads_us[:, -1].max(axis=1)
        position = int(np.lexsort((busiest, self._devices, np.isinf(busiest)))[0])
        if np.isinf(busiest[position]):
            return ()
        names = list(range(len(self.problem.topology.places)))  # the place that each name of the state stands for
        found = []
        while cut < self.problem.chain.end:
            row, step, covered = int(here.rows[position]), int(here.steps[position]), int(here.covered[position])
            before = dict(zip(self.placed.orders[self.placed.step_order[step]], names, strict=True))
            names = [before[place] for place in range(len(names))]
            taken = dict(zip(names, self.placed.allocations[self.placed.step_allocation[step]], strict=True))
            cut = int(self._last[row])
            found.append(Stage(int(self._first[row]), cut, tuple(taken[place] for place in range(len(names))),
                               self.problem.recompute_choices[here.recompute[position]]))
            if cut < self.problem.chain.end:
                position = int(self._head_states[self._heads[cut, int(self.placed.step_head[step]) * self._width + covered]])
                here = self._states[cut]
        return tuple(found)

    def _begin(self, cut: int, allowed: Booleans, before: int, time_us: float) -> tuple[Ints, _Ways]:
        """The states at a cut where stages begin."""
        placed, width = self.placed, self._width
        rows, allocations, limits, choices = self._laid(cut, allowed, before)
        bounds = placed.step_bounds[allocations]
        each = np.arange(len(rows))
        owner, steps = _spread(bounds[each, self._least[self._last[rows]]], bounds[each, limits + 1])
        owner, steps = owner.repeat(width), steps.repeat(width)
        self.looked += len(steps) * self.placed.links
        self.work.left -= len(steps) * self.placed.links
        covered = np.arange(len(steps)) % width
        target = self._next[allocations[owner], covered]
        numbers = self._heads[self._last[rows[owner]], placed.step_head[steps] * width + covered]
        good = np.flatnonzero((numbers >= 0) & (target >= 0) & ((cut > 0) | (target == self._wanted)))
        owner, steps, covered, target = owner[good], steps[good], covered[good], target[good]
        rows, allocations, choices = rows[owner], allocations[owner], choices[owner]
        numbers = numbers[good]
        ring = (self._ring[placed.counts[allocations]] * self._sizes[rows])[:, None] * placed.ring_us[allocations]
        good, loads = _within(self._head_loads_us, numbers, ring, time_us)
        order = placed.link_orders[placed.step_order[steps[good]]]
        loads = np.take_along_axis(loads, order[:, None, :], axis=2)
        states, chosen, least = _least_by(placed.step_state[steps[good]] * width + target[good], loads)
        chosen = good[chosen]
        return states, _Ways(least, rows[chosen], steps[chosen], choices[chosen], covered[chosen])

    def _laid(self, cut: int, allowed: Booleans, before: int) -> tuple[Ints, Ints, Ints, Ints]:
        """Stages that begin at a cut, on every allocation: row, allocation, the most devices after it, and which choice of recomputing.

        Of allocations of one pattern the smallest is enough, unless memory lets more come after a larger one, it covers more, or it has
        longer batches, so that its ring carries less.
        """
        first, stop = self._begins[cut], self._begins[cut + 1]
        ways, rows = np.nonzero(allowed[:, first:stop])
        rows += first
        limits = np.minimum(self._limits[ways, rows], self.max_devices - self._replicas[ways] - before)
        good = limits >= self._least[self._last[rows]]
        ways, rows, limits = ways[good], rows[good], limits[good]
        owner, places = _spread(self._way_bounds[ways], self._way_bounds[ways + 1])
        allocations = self._way_allocations[places]
        rows, limits, choices = rows[owner], limits[owner], self._choices[ways][owner]
        pattern, covers = self.placed.patterns[allocations], self._covers[allocations]
        order = np.lexsort((choices, self.placed.counts[allocations], pattern, rows))
        rows, allocations, limits, choices, pattern, covers = (
            array[order] for array in (rows, allocations, limits, choices, pattern, covers))
        ring = self._ring[self.placed.counts[allocations]]
        worse = (rows[1:] == rows[:-1]) & (pattern[1:] == pattern[:-1]) & (limits[1:] <= limits[:-1])
        worse &= (covers[1:] & ~covers[:-1] == 0) & (ring[1:] >= ring[:-1])
        keep = np.flatnonzero(np.concatenate([[True], ~worse]))[:len(rows)]
        return rows[keep], allocations[keep], limits[keep], choices[keep]

    def _transfer(self, cut: int, states: Ints, ways: _Ways, time_us: float) -> bool:
        """Note the heads before the states of a cut, with what is sent over it; whether there are any."""
        placed, chain, width = self.placed, self.problem.chain, self._width
        most = np.maximum(self.max_devices - self._before_ending[cut] - placed.state_devices[states // width], 0)  # of a stage before
        positions, pairs = _spread(placed.transfer_bounds[states // width, 0], placed.transfer_bounds[states // width, most + 1])
        share = placed.transfer_share[pairs]
        leaves, enters = placed.leaves_us[share], placed.enters_us[share]
        forward, gradient = float(chain.forward_bytes[cut]), float(chain.gradient_bytes[cut])
        sent = np.concatenate([forward * leaves + gradient * enters, forward * enters + gradient * leaves], axis=1)
        good, loads = _within(ways.loads_us, positions, sent, time_us)
        if not len(good):
            return False
        heads, chosen, least = _least_by(placed.transfer_head[pairs[good]] * width + states[positions[good]] % width, loads)
        self._heads[cut, heads] = self._head_count + np.arange(len(heads))
        self._note_heads(least, positions[good][chosen])
        return True

    def _note_heads(self, loads_us: Floats, states: Ints) -> None:
        """Add heads to those found; room for them is doubled when there is no more."""
        needed = self._head_count + len(states)
        if needed > len(self._head_states):
            more = max(needed, 2 * len(self._head_states)) - len(self._head_states)
            self._head_states = np.concatenate([self._head_states, np.empty(more, dtype=np.int64)])
            self._head_loads_us = np.concatenate([self._head_loads_us, np.empty((more, *loads_us.shape[1:]))])
        self._head_loads_us[self._head_count:needed], self._head_states[self._head_count:needed] = loads_us, states
        self._head_count = needed


def _within(loads: Floats, numbers: Ints, more: Floats, time_us: float) -> tuple[Ints, Floats]:
    """Which of the numbered loads, each with more, are within T as far as least loads tell, and those; real ways that are not: infinite."""
    limit_us = time_us * (1 + _SLACK)
    good = np.flatnonzero((loads[numbers, 0] + more <= limit_us).all(axis=1))
    found: Floats = loads[numbers[good]] + more[good, None, :]
    if found.shape[1] > 1:
        found[(found[:, -1] > limit_us).any(axis=1), -1] = np.inf
    return good, found


def _least_by(keys: Ints, loads: Floats) -> tuple[Ints, Ints, Floats]:
    """The distinct keys in order; for each, the entry whose real way is least busy; and the least loads one by one, and that way's."""
    if not len(keys):
        return keys, keys, loads
    order = np.lexsort((loads[:, -1].max(axis=1), keys))
    starts = np.flatnonzero(np.concatenate([[True], np.diff(keys[order]) != 0]))
    chosen = order[starts]
    least = loads[chosen]
    least[:, 0] = np.minimum.reduceat(loads[order, 0], starts, axis=0)
    return keys[chosen], chosen, least


def _spread(starts: Ints, stops: Ints) -> tuple[Ints, Ints]:
    """All numbers of the ranges, and which range each is of."""
    sizes = np.maximum(stops - starts, 0)
    owner = np.repeat(np.arange(len(starts)), sizes)
    return owner, starts[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
