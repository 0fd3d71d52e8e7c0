"""Which scenarios are worth a search: branch and bound over groups of them.

Scenarios differ in the batch, and there may be thousands. A group has a bound of its own (:mod:`planner.search.loose`),
that no scenario of it is below; a group whose bound is not below the best plan is left out with one question::

    all scenarios -- batches above 512 -- multiples that share their small prime powers -- ... -- one scenario

The group with the lowest bound is looked at first, and halved if it is not one scenario. So at any moment nothing
that is left is below the lowest bound of a group that is left, which is what is proven where time ends.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from planner.hardware.topology import Site
from planner.search.loose import Loose
from planner.search.problem import Problem, Scenario, prime_powers
from planner.search.work import is_late

__all__ = ["Groups"]

_SMALL_PRIMES = (2, 3, 5, 7, 11, 13)
_TOLERANCE = 5e-3  # of a group's bound; that of one scenario is refined when it is looked at


class Groups:
    """The scenarios that are left. ``bound_us`` is what no plan in them is below; infinite when none is left.

    At most ``most_halved`` groups are halved.
    """

    def __init__(self, problem: Problem, scenarios: list[Scenario], sites: list[Site], deadline: float | None,
                 most_halved: float = np.inf) -> None:
        self.problem, self.sites, self.deadline, self.most_halved = problem, sites, deadline, most_halved
        self.scenarios = sorted(scenarios, key=_likeness)
        self._left: list[tuple[float, int, list[Scenario], Loose]] = []
        self.root = Loose(problem, self.scenarios, sites, None, deadline)

    def promising(self, count: int) -> list[Scenario]:
        """Some that often are good: long batches that many replica counts divide."""
        return sorted(self.scenarios, key=lambda s: (-_divisors(s.multiple) * s.batch_microbatches ** 0.5, s.batch_microbatches))[:count]

    def within(self, ceiling_us: Callable[[], float],
               most_devices: Callable[[], int] | None = None) -> Iterator[tuple[Scenario, Loose, float]]:
        """Scenarios that may have a plan within ``ceiling_us()``, on at most ``most_devices()``, with their bounds; lowest first.

        Both may fall while the scenarios are looked at. Those that are not are left in ``bound_us``.
        """
        self._left, number = [], 0
        self._push(self.root, self.scenarios, ceiling_us(), most_devices, 0.0, 0)
        while self._left and not self.late and number < 2 * self.most_halved:
            low_us, _, scenarios, loose = self._left[0]
            limit_us = ceiling_us()
            if low_us > limit_us:
                self._left.clear()
                return
            if len(scenarios) == 1:
                yield scenarios[0], loose, low_us
                self._left = [entry for entry in self._left if entry[3] is not loose]
                heapq.heapify(self._left)
                continue
            heapq.heappop(self._left)
            middle, kept = len(scenarios) // 2, loose.useful(limit_us) if limit_us < np.inf else None
            for half in (scenarios[:middle], scenarios[middle:]):
                number += 1
                self._push(Loose(self.problem, half, self.sites, kept, self.deadline), half, limit_us, most_devices, low_us, number)

    def _push(self, loose: Loose, scenarios: list[Scenario], ceiling_us: float, most_devices: Callable[[], int] | None, low_us: float,
              number: int) -> None:
        if most_devices is not None:
            fewest = loose.fewest_devices(ceiling_us)
            if fewest is not None and fewest <= most_devices():
                heapq.heappush(self._left, (0.0, number, scenarios, loose))
            return
        bounds = loose.lowest_us(ceiling_us, _TOLERANCE, low_us)
        if bounds is not None:
            heapq.heappush(self._left, (bounds[0], number, scenarios, loose))

    @property
    def late(self) -> bool:
        return is_late(self.deadline)

    @property
    def bound_us(self) -> float:
        return self._left[0][0] if self._left else np.inf


def _likeness(scenario: Scenario) -> tuple[int, int, int, int]:
    """Neighbours in this order have similar batches, and admit similar replica counts."""
    small = math.prod(power for power in prime_powers(scenario.multiple) if any(power % prime == 0 for prime in _SMALL_PRIMES))
    return scenario.batch_microbatches.bit_length(), small, scenario.batch_microbatches, scenario.vertical_versions or 0


def _divisors(number: int) -> int:
    """How many there are."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return 2 * len(small) - (small[-1] ** 2 == number)
