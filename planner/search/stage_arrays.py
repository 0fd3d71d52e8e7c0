"""Every stage of a model at once, as arrays: the cost model of :mod:`planner.cost` and the memory of :mod:`planner.memory`.

The formulas are theirs, operation by operation, so that a time found here is to the last bit the time that
a single stage is given there; the tests compare.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from planner.hardware.topology import Site
from planner.memory import depth_within_batch
from planner.model.graph import Chain
from planner.search.problem import Problem, Scenario

__all__ = ["Ints", "StageArrays", "least_before", "stage_arrays"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_WHOLE = 2**61  # sums below this are exact in 64 bits


@lru_cache(maxsize=4)
def stage_arrays(chain: Chain) -> StageArrays:
    """Of a chain, once: scenarios share them."""
    return StageArrays(chain)


def least_before(begins: list[int], last: Ints, weights: Ints, never: int) -> Ints:
    """For each cut, the least weight of stages that run the layers before it; ``never`` where none do.

    The stages stand by ``first``: those of a cut are numbers ``begins[cut]`` to ``begins[cut + 1]``.
    """
    end = len(begins) - 2
    before = np.full(end + 1, never, dtype=np.int64)
    before[0] = 0
    for cut in range(end):
        part = slice(begins[cut], begins[cut + 1])
        if before[cut] < never:
            np.minimum.at(before, last[part], before[cut] + weights[part])
    return before


class StageArrays:
    """The stages [first, last) of a chain, by ``first`` and then ``last``."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.first, self.last = np.nonzero(chain.states.inside())
        self.compute_us, self.forward_us, self.update_us, self.copy_us = (
            self._difference(np.array(sums)) for sums in (chain.compute_us, chain.forward_us, chain.update_us, chain.copy_us))
        self.parameters = self._difference(_whole(chain.parameter_bytes))
        forward, gradient = _whole(chain.forward_bytes), _whole(chain.gradient_bytes)
        self.received = forward[self.first]
        inward, outward = self.received + gradient[self.last], forward[self.last] + gradient[self.first]
        self.busier = np.maximum(inward, outward).astype(np.float64)
        self.sizes = self.parameters.astype(np.float64)
        self._memory: tuple[Any, ...] | None = None

    def some(self, rows: Ints) -> StageArrays:
        """These of the stages, in the same order."""
        self.parts_bytes()
        result = copy.copy(self)
        for name in ("first", "last", "compute_us", "forward_us", "update_us", "copy_us", "parameters", "received", "busier", "sizes"):
            setattr(result, name, getattr(self, name)[rows])
        result._memory = tuple(part[rows] for part in self.parts_bytes())
        return result

    def _difference(self, sums: Any) -> Any:
        return sums[self.last] - sums[self.first]

    def updates_us(self, problem: Problem, scenario: Scenario) -> Floats:
        """Of one update of each stage, with the copy of its weights where the policy keeps an older version."""
        is_first, is_last = self.first == 0, self.last == self.chain.end
        copies = np.select([is_first & is_last, is_first, is_last], [
            scenario.copies(problem.policy, is_first=True, is_last=True), scenario.copies(problem.policy, is_first=True, is_last=False),
            scenario.copies(problem.policy, is_first=False, is_last=True)], scenario.copies(problem.policy, is_first=False, is_last=False))
        update_us: Floats = np.where(copies, self.update_us + self.copy_us, self.update_us)
        return update_us

    def cost_us(self, problem: Problem, scenario: Scenario, site: Site, recompute: bool = False) -> Floats:
        """What :func:`planner.cost.stage_cost` calls ``bottleneck_us`` of each stage at ``site``."""
        r, batch = site.replicas, scenario.batch_microbatches
        update_us = self.updates_us(problem, scenario)
        allreduce_us = np.zeros(len(self.first))
        if r > 1:
            allreduce_us = 2 * (r - 1) / r * self.sizes / site.ring_bandwidth_bytes_per_s * 1e6 + 2 * (r - 1) * site.ring_latency_us
        load = self.busier / r + 2 * (r - 1) / r * self.sizes / batch
        compute_us = self.compute_us + self.forward_us if recompute else self.compute_us
        stage_us = compute_us / site.speed / r + update_us / site.speed / batch + allreduce_us / batch
        if problem.policy == "flush":
            everybody_us = self.chain.compute_us[self.chain.end] / problem.topology.fastest
            stage_us = stage_us + np.maximum(everybody_us - self.compute_us / site.speed, 0.0) / batch
        bottleneck_us: Floats = np.maximum(stage_us, load / site.device_bandwidth_bytes_per_s * 1e6)
        return bottleneck_us

    def max_after(self, problem: Problem, scenario: Scenario, site: Site, recompute: bool = False) -> Ints:
        """The most devices after each stage with which one replica fits; below 0 where it never does."""
        r, limit = site.replicas, site.memory_bytes
        most = np.where(self.last == self.chain.end, 0, scenario.max_devices - r)
        if limit is not None:
            deepest = 1 + -(-most // r)
            depths = [depth_within_batch(problem.policy, depth, r, scenario.batch_microbatches)
                      for depth in range(int(deepest.max(initial=1)) + 1)]
            real, versions = np.array(depths), np.array([scenario.versions(problem.policy, r, max(depth, 1)) for depth in depths])
            low, high = np.zeros_like(deepest), deepest + 1  # it fits at ``low`` (or that is 0), and not at ``high``
            while (high - low > 1).any():
                middle = np.where(high - low > 1, (low + high) // 2, np.maximum(low, 1))
                fits = np.asarray(self._need_bytes(real[middle], versions[middle], recompute) <= limit, dtype=np.bool_)
                low, high = np.where((high - low > 1) & fits, middle, low), np.where((high - low > 1) & ~fits, middle, high)
            most = np.where(low < deepest, np.minimum(most, (low - 1) * r), most)
        for index in np.flatnonzero((self.first == 0) & (most >= 0)) if scenario.vertical_versions is not None else ():
            while most[index] >= 0 and not scenario.allows_first(problem.policy, r, int(most[index])):
                most[index] -= 1
        return np.maximum(most, -1)

    def _need_bytes(self, in_flight: Ints, versions: Ints, recompute: bool) -> Any:
        """The total of :func:`planner.memory.replica_memory`."""
        fixed_bytes, saved_bytes, received_bytes = self.parts_bytes()
        return self.parameters * versions + fixed_bytes + received_bytes * in_flight + saved_bytes * (1 if recompute else in_flight)

    def parts_bytes(self) -> tuple[Any, ...]:
        """What each stage holds whatever is in flight (but for its weights), what a microbatch saves, and what it receives for one."""
        if self._memory is None:
            chain = self.chain
            fixed = [self._difference(_whole(sums)) for sums in (chain.buffer_bytes, chain.optimizer_bytes)]
            self._memory = (fixed[0] + fixed[1] + self.parameters + _whole(self._workspaces()), self._difference(_whole(chain.saved_bytes)),
                            self.received)
        return self._memory

    def _workspaces(self) -> list[int]:
        if not self.chain.states.nested:
            return [self.chain.workspace(first, last) for first, last in zip(self.first.tolist(), self.last.tolist(), strict=True)]
        steps = np.array([self.chain.workspace(state, state + 1) for state in range(self.chain.end)])
        rows = [np.maximum.accumulate(steps[first:]) for first in range(self.chain.end)]
        found: list[int] = np.concatenate(rows).tolist()
        return found


def _whole(values: Any) -> Any:
    """Whole numbers as an array in which sums of a few thousand of them stay exact."""
    return np.array(values, dtype=np.int64 if max(values, default=0) < _WHOLE // 10**5 else object)
