"""Which scenarios may still have a better plan when places and links are looked at too, and good plans on the way.

Scenarios are asked together first (:func:`planner.search.problem.covering`): what is out of the question for a scenario that
covers them all is so for each. Else they are halved, down to single ones, of which :class:`planner.search.linked.Linked` knows
everything but pins, and which stages share which links.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from planner.cost import Stage
from planner.search.linked import Linked
from planner.search.loose import Loose
from planner.search.placings import Placings
from planner.search.problem import Problem, Scenario, covering
from planner.search.work import Work, is_late

__all__ = ["Laying", "Left"]

PROMISING = 3  # scenarios that are looked at first
MOST_TRIALS = 25  # of one scenario
MOST_WORK = 250_000_000  # steps times links, in one search: about half a minute
MOST_LOOKED = 20_000_000  # of them, to save a device
FEW = 1_200_000  # of them; the integer program is asked too
_STEPS = (1.01, 1.04, 1.1, 1.2, 1.3, 1.5, 2.0, 3.0, 5.0)  # of a bound, where a plan is looked for
_FIRST = 1.02  # the same for one scenario
_CLOSE = 3e-3  # relative distance of a bound and the best plan that is not halved any more


class Left(NamedTuple):
    """A scenario that may have a better plan: none is below ``low_us``, and ``loose`` knows the stages of those within a time."""

    low_us: float
    number: int
    scenario: Scenario
    loose: Loose


class Laying:
    """Of a problem. ``offer`` takes a plan; ``ceiling_us`` is what a better one must be within, and may fall as plans are offered."""

    def __init__(self, problem: Problem, placed: Placings, offer: Callable[[tuple[Stage, ...]], None], ceiling_us: Callable[[], float],
                 deadline: float | None) -> None:
        self.problem, self.placed, self.offer, self.ceiling_us, self.deadline = problem, placed, offer, ceiling_us, deadline
        self.work = Work(MOST_WORK)

    def better(self, left: list[Left]) -> list[Left]:
        """Those that may still have a plan within the ceiling, with better bounds."""
        kept: list[Left] = []
        left, apart = self._approached(left)
        for group in self._groups(left, self.ceiling_us, apart):
            linked = self._linked(group, self.ceiling_us())
            if self.late or self.work.left < 0 or (linked is None and len(group) == 1):
                kept += group
            elif linked is None:
                self._halve(group)
            elif len(group) == 1:
                low_us = self._raised(linked, group[0].low_us)
                kept += [group[0]._replace(low_us=low_us)] if low_us is not None else []
            elif linked.within(self.ceiling_us(), real=False) is not None or linked.unanswered:
                self._halve(group)
        return [one for one in kept if one.low_us <= self.ceiling_us()]

    def _approached(self, left: list[Left]) -> tuple[list[Left], bool]:
        """With a bound of all of them together, looked for from below, as lower times take less; and whether it is the highest."""
        low_us = min((one.low_us for one in left), default=0.0)
        for step in _STEPS:
            trial_us = low_us * step
            if trial_us >= self.ceiling_us():
                break
            linked = self._linked(left, trial_us)
            if linked is None:
                return left, True
            if linked.within(trial_us) is not None:
                self.offer(linked.stages())
                return left, True
            if linked.unanswered:
                return left, True
            left = [one._replace(low_us=max(trial_us, one.low_us)) for one in left]
        return left, False

    def on_fewer(self, left: list[Left], within_us: float, devices: Callable[[], int]) -> list[Left]:
        """Those that may have a plan within a time on fewer ``devices()`` than the best has, which may fall as plans are offered.

        Of those only the ones of which the integer program is soon asked; none where looking for them takes long.
        """
        kept, looked = [], 0
        for group in self._groups(left, lambda: within_us):
            linked = self._linked(group, within_us, devices() - 1)
            if linked is None:
                if len(group) > 1:
                    self._halve(group)
                continue
            fewest = linked.within(within_us, MOST_LOOKED - looked, real=len(group) == 1)
            looked += linked.looked
            if linked.unanswered:
                return []
            if fewest is None:
                continue
            if len(group) > 1:
                self._halve(group)
            else:
                self.offer(linked.stages())
                kept += group if linked.looked <= FEW else []
        return kept

    @property
    def late(self) -> bool:
        return is_late(self.deadline)

    def _groups(self, left: list[Left], limit_us: Callable[[], float], apart: bool = False) -> Iterator[list[Left]]:
        """Groups of those within a time: all together (unless ``apart``), and where a group is given to :meth:`_halve` its parts.

        Of many, promising ones come alone.
        """
        order = sorted(left, key=lambda one: (-one.scenario.batch_microbatches * self._counts(one.scenario), one))
        self._waiting = []
        if apart:
            self._halve(order)
        else:
            self._waiting.append(order)
        while self._waiting:
            group = [one for one in self._waiting.pop() if one.low_us <= limit_us()]
            if group:
                yield group

    def _counts(self, scenario: Scenario) -> int:
        """How many replica counts it admits."""
        return sum(scenario.admits(r) for r in range(1, self.problem.max_replicas + 1))

    def _halve(self, group: list[Left]) -> None:
        if len(group) > 2 * PROMISING:
            self._waiting += [sorted(group[PROMISING:]), *([one] for one in reversed(group[:PROMISING]))]
        else:
            middle = (len(group) + 1) // 2
            self._waiting += [group[middle:], group[:middle]]

    def _linked(self, group: list[Left], limit_us: float, max_devices: int | None = None) -> Linked | None:
        """None where it cannot be asked: there is no simple scenario that covers the group, or it would take too much memory."""
        scenarios = [one.scenario for one in group]
        if covering(self.problem, scenarios) is None:
            return None
        rows = np.unique(np.concatenate([one.loose.useful(limit_us).rows for one in group]))
        most = max(one.max_devices for one in scenarios)
        if max_devices is not None:
            most = min(most, max_devices)
        linked = Linked(self.problem, scenarios, self.placed, rows, most, self.work, self.deadline)
        return None if linked.too_large else linked

    def _raised(self, linked: Linked, low_us: float) -> float | None:
        """The highest bound of one scenario that can be shown, with the plans met on the way offered; None where that is the ceiling."""
        high_us, step, trial_us = math.inf, _FIRST, min(low_us * _FIRST, self.ceiling_us())  # high: there may be a plan, but none was found
        for _ in range(MOST_TRIALS):
            if linked.within(trial_us) is not None:
                high_us = min(high_us, trial_us)
                self.offer(linked.stages())
            elif linked.unanswered:
                break
            elif trial_us >= self.ceiling_us():
                return None
            else:
                low_us = trial_us
            top_us = min(high_us, self.ceiling_us())
            if top_us <= low_us * (1 + _CLOSE):
                if high_us <= self.ceiling_us():
                    break
                trial_us = self.ceiling_us()
            elif high_us < math.inf:
                trial_us = (low_us + top_us) / 2
            else:
                step = min(step * step, _STEPS[-1])
                trial_us = min(low_us * step, top_us)
        return low_us
