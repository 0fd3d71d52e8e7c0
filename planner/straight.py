"""The straight pipeline: one replica a stage, on the devices in tree order.

A dynamic program from the end of the model, over the devices that are taken. With ``P_d(c)`` the least largest
cost of the layers after cut c on d devices::

    P_{d+1}(b) = least over c of   max(stage [b, c) on the next device, its transfers at c, P_d(c))

A cost is a stage, its device's link, or one cut's transfers over a shared link; what two cuts add up to on the
link of a server is seen only when the whole pipeline is evaluated. On one server that is the optimum, and
elsewhere a good pipeline of its kind.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from planner.cost import Stage
from planner.hardware.topology import Site
from planner.search.problem import Problem, Scenario
from planner.search.stage_arrays import StageArrays, stage_arrays

__all__ = ["straight_pipeline"]

MOST_STEPS = 30_000_000  # of the dynamic program: stages times devices, about half a second

Floats = npt.NDArray[np.float64]
_Choice = tuple[bool, Floats, npt.NDArray[np.int64]]  # whether it recomputes, its costs, the most devices after it


def straight_pipeline(problem: Problem, batch_microbatches: int, *, within_memory: bool = True) -> tuple[Stage, ...] | None:
    """Its stages; () when there is none that fits, None when the model is too large to look for it.

    ``within_memory`` False lets a stage need more than its device has.
    """
    arrays, topology, chain = stage_arrays(problem.chain), problem.topology, problem.chain
    devices = [place for place, count in enumerate(topology.capacities) for _ in range(count)]
    devices = devices[: min(problem.max_devices, chain.most_stages)]
    if problem.policy == "2bw":
        devices = devices[:batch_microbatches]
    if len(arrays.first) * len(devices) > MOST_STEPS:
        return None
    starts = np.searchsorted(arrays.first, np.arange(chain.end))
    rows = _Rows(problem, arrays, Scenario(batch_microbatches, batch_microbatches, False, 1, problem.max_devices), within_memory)
    best = [np.full(chain.end + 1, np.inf)]
    best[0][chain.end] = 0.0
    for after, place in enumerate(devices):
        onward_us = np.maximum(best[after], rows.transfers_us(place, devices[after - 1]) if after else 0.0)
        values = np.maximum(rows.costs_us(place, after), onward_us[arrays.last])
        best.append(np.append(np.minimum.reduceat(values, starts), np.inf))
    count = min(range(1, len(best)), key=lambda d: (best[d][0], d))
    if not np.isfinite(best[count][0]):
        return ()
    stages, cut = [], 0
    for after in reversed(range(count)):
        place = devices[after]
        onward_us = np.maximum(best[after], rows.transfers_us(place, devices[after - 1]) if after else 0.0)
        part = slice(starts[cut], starts[cut + 1] if cut + 1 < chain.end else len(arrays.first))
        index = part.start + int(np.argmin(np.maximum(rows.costs_us(place, after)[part], onward_us[arrays.last[part]])))
        again = bool(rows.recomputes(place, after)[index])
        stages.append(Stage(cut, int(arrays.last[index]), topology.alone(place), again))
        cut = int(arrays.last[index])
    return tuple(stages)


class _Rows:
    """What each stage costs on a device of a place, before so many devices; infinite where it does not fit."""

    def __init__(self, problem: Problem, arrays: StageArrays, scenario: Scenario, within_memory: bool) -> None:
        self.problem, self.within_memory = problem, within_memory
        self._choices: list[list[_Choice]] = []
        by_site: dict[Site, list[_Choice]] = {}
        for place in range(len(problem.topology.places)):
            site = problem.topology.site(problem.topology.alone(place))
            if site not in by_site:
                by_site[site] = [(again, arrays.cost_us(problem, scenario, site, again), arrays.max_after(problem, scenario, site, again))
                                 for again in problem.recompute_choices]
            self._choices.append(by_site[site])

    def recomputes(self, place: int, after: int) -> npt.NDArray[np.bool_]:
        """Whether each stage must recompute to fit."""
        again, times_us, most_after = self._choices[place][0]
        if len(self.problem.recompute_choices) == 1 or not self.within_memory:
            return np.full(len(times_us), again)
        return most_after < after

    def costs_us(self, place: int, after: int) -> Floats:
        """The bottleneck of each stage, as it fits."""
        choices = self._choices[place]
        if not self.within_memory:
            return choices[0][1]
        costs: Floats = np.full(len(choices[0][1]), np.inf)
        for _, times_us, most_after in reversed(choices):  # the first that fits counts
            costs = np.where(most_after >= after, times_us, costs)
        return costs

    def transfers_us(self, place: int, next_place: int) -> Floats | float:
        """Of each cut between a device of one place and a device of the next, over the busiest shared link."""
        chain, topology = self.problem.chain, self.problem.topology
        pairs = topology.crossing_us_per_byte(topology.alone(place), topology.alone(next_place))
        forward, gradient = np.array(chain.forward_bytes, dtype=np.float64), np.array(chain.gradient_bytes, dtype=np.float64)
        return np.max([np.maximum(forward * up + gradient * down, forward * down + gradient * up) for up, down in pairs],
                      axis=0) if pairs else 0.0
