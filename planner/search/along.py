"""The best stages along an order of the devices: each stage takes the next ones, so a plan is cuts and replica counts.

A dynamic program over (cut, devices after it), all stages that begin at a cut at once. It minimises the largest
single cost: a stage, its devices' links, one cut's transfers over one shared link, or what all rings and transfers
come to on the average shared link, once as it is and once at a multiple, as some link is busier than the average.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from planner.cost import Stage
from planner.hardware.topology import Allocation, Site
from planner.search.problem import Problem, Scenario, prime_powers
from planner.search.stage_arrays import Ints, stage_arrays
from planner.search.work import Work, is_late

__all__ = ["MOST_STEPS", "stages_along"]

Floats = npt.NDArray[np.float64]
MOST_STEPS = 8_000_000  # of all dynamic programs of one search, stages times replica counts times devices after them: a few seconds
_WEIGHTS = (1.0, 2.0)  # of the average link's load


def stages_along(problem: Problem, scenario: Scenario, order: list[int], unit: int, rows: Ints, ceiling_us: float, work: Work,
                 deadline: float | None) -> Iterator[tuple[Stage, ...]]:
    """Stages with costs below ``ceiling_us``, for each weight of the average link, where there are any.

    Devices are taken ``unit`` at a time. ``rows`` are the stages to choose from, as in :mod:`planner.search.stage_arrays`.
    """
    most = min(problem.max_replicas, scenario.max_devices, len(order))
    counts = [r // unit for r in range(unit, most + 1, unit) if scenario.admits(r)]
    steps = len(rows) * len(counts) * len(order) // unit * (problem.stages or 1)
    if not counts or steps > work.left:
        return
    one = _Along(problem, scenario, order, unit, counts, rows, ceiling_us)
    found: tuple[Stage, ...] = ()
    for weight in _WEIGHTS:
        if is_late(deadline):
            return
        work.left -= steps
        again = one.best(weight, deadline)
        if again and again != found:
            yield again
        found = again
        if not again:  # nor with a larger weight
            return


class _Along:
    def __init__(self, problem: Problem, scenario: Scenario, order: list[int], unit: int, counts: list[int], rows: Ints,
                 ceiling_us: float) -> None:
        self.problem, self.unit, self.counts, self.ceiling_us = problem, unit, counts, ceiling_us
        self.most = min(len(order), scenario.max_devices) // unit  # devices, in units as all counts here
        # As in planner.search.bound, a state: prime powers of the batch that are covered and, above those bits, the number of stages.
        powers = prime_powers(scenario.multiple) if scenario.exact and unit > 1 else ()  # by ones it would take too long
        self.one_stage = (1 << len(powers)) if problem.stages is not None else 0
        self.wanted = (problem.stages or 0) << len(powers) | (1 << len(powers)) - 1
        self.masks = [sum(1 << bit for bit, power in enumerate(powers) if r * unit % power == 0) for r in counts]
        stages = stage_arrays(problem.chain).some(rows)
        self.first, self.last = stages.first, stages.last
        self.begins: list[int] = np.searchsorted(self.first, np.arange(problem.chain.end + 2)).tolist()
        self.known: dict[tuple[Allocation, Allocation], list[tuple[float, float]]] = {}
        topology = problem.topology
        places = len(topology.places)
        self.shapes = [[_taken(order, after * unit, r * unit, places) for after in range(self.most - r + 1)] for r in counts]
        sites: dict[Site, int] = {}
        self.site = [np.array([sites.setdefault(topology.site(shape), len(sites)) for shape in shapes]) for shapes in self.shapes]
        every = list(sites)
        self.choices = problem.recompute_choices
        self.cost_us = [np.stack([stages.cost_us(problem, scenario, site, again) for site in every]) for again in self.choices]
        self.limit = [np.stack([stages.max_after(problem, scenario, site, again) for site in every]) for again in self.choices]
        self.transfers = [self._transfers(index) for index in range(len(counts))] if topology.shared else []
        links = [1e6 / link.link.bandwidth_bytes_per_s / len(topology.shared) for link in topology.shared]
        self.rings = [np.array([sum(links[i] for i in topology.ring(shape).shared) for shape in shapes]) for shapes in self.shapes]
        self.ring_bytes = [2 * (r * unit - 1) / (r * unit) * stages.sizes / scenario.batch_microbatches for r in counts]

    def _transfers(self, index: int) -> tuple[Floats, Floats]:
        """Microseconds per byte sent and sent back, of senders with one replica count, by devices after and the receiver's count (0: none).

        On each of the differently loaded links; the last entry is the average over all links.
        """
        r = self.counts[index]
        found: dict[tuple[int, int], list[tuple[float, float]]] = {}
        for after, sender in enumerate(self.shapes[index]):
            for number, receives in enumerate(self.counts, start=1):
                if receives <= after:
                    found[after, number] = self._pairs(sender, self.shapes[number - 1][after - receives])
        width = max(map(len, found.values()), default=1)
        up = np.zeros((self.most - r + 1, len(self.counts) + 1, width))
        down = np.zeros_like(up)
        for (after, number), pairs in found.items():
            up[after, number, -1], down[after, number, -1] = pairs[-1]
            for position, pair in enumerate(pairs[:-1]):
                up[after, number, position], down[after, number, position] = pair
        return up, down

    def _pairs(self, sender: Allocation, receiver: Allocation) -> list[tuple[float, float]]:
        topology = self.problem.topology
        key = (topology.pattern(sender), topology.pattern(receiver))
        if key not in self.known:
            links = [link.link.bandwidth_bytes_per_s / 1e6 for link in topology.shared]
            times = [(up / rate, down / rate) for (up, down), rate in zip(topology.crossings(*key), links, strict=True)]
            average = (sum(up for up, _ in times) / len(times), sum(down for _, down in times) / len(times))
            pairs = {(max(pair), min(pair)) for pair in times}  # a link is as busy as its busier direction
            most = [one for one in pairs if not any(one != other and one[0] <= other[0] and one[1] <= other[1] for other in pairs)]
            self.known[key] = [*sorted(most), average]
        return self.known[key]

    def best(self, weight: float, deadline: float | None) -> tuple[Stage, ...]:
        """The stages whose largest cost is smallest; () without any below the ceiling."""
        chain = self.problem.chain
        layers = self.wanted + 1
        value = np.full((layers, chain.end + 1, self.most + 1), np.inf)
        follows = np.zeros((layers, chain.end + 1, self.most + 1), dtype=np.int64)  # replica count of the stage that begins there
        burden = np.zeros_like(value)  # microseconds of the average shared link
        ends, recompute, before = np.zeros_like(follows), np.zeros_like(follows), np.zeros_like(follows)
        value[0, chain.end, 0] = -1.0
        forward, gradient = np.array(chain.forward_bytes, dtype=np.float64), np.array(chain.gradient_bytes, dtype=np.float64)
        for cut in range(chain.end - 1, -1, -1):
            part = slice(self.begins[cut], self.begins[cut + 1])
            last = self.last[part]
            if not len(last):
                continue
            if is_late(deadline):
                return ()
            for index, r in enumerate(self.counts):
                width = self.most - r + 1
                after = np.arange(width)
                site = self.site[index]
                costs = np.stack([np.where(after[:, None] * self.unit <= limit[site, part], cost_us[site, part], np.inf)
                                  for cost_us, limit in zip(self.cost_us, self.limit, strict=True)])
                again, costs = costs.argmin(axis=0), costs.min(axis=0)
                for k in range(layers):
                    to = (k | self.masks[index]) + self.one_stage
                    rest = value[k][last, :width].T
                    if to > self.wanted:
                        continue
                    total = np.maximum(costs, rest)
                    if not (total < self.ceiling_us).any():
                        continue
                    load, key = np.zeros_like(total), total
                    if self.transfers:
                        up, down = (array[after[:, None], follows[k][last, :width].T] for array in self.transfers[index])
                        sent, back = forward[last][None, :, None], gradient[last][None, :, None]
                        busier = np.maximum(sent * up + back * down, sent * down + back * up)
                        load = burden[k][last, :width].T + busier[:, :, -1] + self.rings[index][:, None] * self.ring_bytes[index][part]
                        total = np.maximum(total, busier.max(axis=2))
                        key = np.maximum(total, weight * load) + 1e-6 * load
                    choice = key.argmin(axis=1)
                    least, most = total[after, choice], load[after, choice]
                    known_us = np.maximum(value[to, cut, r:], weight * burden[to, cut, r:]) + 1e-6 * burden[to, cut, r:]
                    better = np.flatnonzero((key[after, choice] < known_us) & (least < self.ceiling_us))
                    value[to, cut, r + better], burden[to, cut, r + better] = least[better], most[better]
                    follows[to, cut, r + better] = index + 1
                    ends[to, cut, r + better] = last[choice[better]]
                    recompute[to, cut, r + better] = again[better, choice[better]]
                    before[to, cut, r + better] = k
        return self._walk(np.where(value < self.ceiling_us, np.maximum(value, weight * burden), np.inf), follows, ends, recompute, before)

    def _walk(self, value: Floats, follows: Ints, ends: Ints, recompute: Ints, before: Ints) -> tuple[Stage, ...]:
        k, cut = self.wanted, 0
        devices = int(value[k, 0].argmin())
        if not np.isfinite(value[k, 0, devices]):
            return ()
        stages: list[Stage] = []
        while cut < self.problem.chain.end:
            index = int(follows[k, cut, devices]) - 1
            last, after = int(ends[k, cut, devices]), devices - self.counts[index]
            stages.append(Stage(cut, last, self.shapes[index][after], self.choices[recompute[k, cut, devices]]))
            k, cut, devices = int(before[k, cut, devices]), last, after
        return tuple(stages)


def _taken(order: list[int], after: int, r: int, places: int) -> Allocation:
    """Devices number ``after`` to ``after + r`` of the order, counted from the end of the model."""
    allocation = [0] * places
    for place in order[after:after + r]:
        allocation[place] += 1
    return tuple(allocation)
