"""The fewest units of a path of stages, for a given time: a dynamic program that bounds the linear program, and prunes it."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["IMPOSSIBLE", "StageCosts", "Step", "fewest_from", "fewest_path", "fewest_to"]

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

IMPOSSIBLE = 1 << 50  # units of a stage that no number of units makes fast enough


class StageCosts(Protocol):
    """Stages [first, last) of a model, sorted by ``last``, and what each costs on a number of units (devices or servers)."""

    @property
    def state_count(self) -> int: ...

    @property
    def first(self) -> Ints: ...

    @property
    def last(self) -> Ints: ...

    def some(self, chosen: Ints) -> StageCosts:
        """These of the stages only."""

    def cost_us(self, units: Ints | int) -> Floats:
        """Of every stage with so many units."""

    def units(self, time_us: float, most: int) -> Ints:
        """The fewest units with which each stage costs at most ``time_us``; IMPOSSIBLE above ``most``."""


class Step(NamedTuple):
    """A stage [first, last) of a path, on so many units."""

    first: int
    last: int
    units: int


def fewest_from(stages: StageCosts, units: Ints, start: int) -> Ints:
    """For each state the fewest units of a path from ``start``; each stage takes its ``units``."""
    fewest = np.full(stages.state_count, IMPOSSIBLE, dtype=np.int64)
    fewest[start] = 0
    bounds = _starts(stages)
    for state in range(start + 1, stages.state_count):
        a, b = bounds[state], bounds[state + 1]
        if a < b:
            fewest[state] = min((fewest[stages.first[a:b]] + units[a:b]).min(), IMPOSSIBLE)
    return fewest


def fewest_to(stages: StageCosts, units: Ints, end: int) -> Ints:
    """For each state the fewest units of a path to ``end``."""
    fewest = np.full(stages.state_count, IMPOSSIBLE, dtype=np.int64)
    fewest[end] = 0
    bounds = _starts(stages)
    for state in range(end, 0, -1):  # every stage that ends here extends the paths that begin here
        a, b = bounds[state], bounds[state + 1]
        if a < b and fewest[state] < IMPOSSIBLE:
            np.minimum.at(fewest, stages.first[a:b], np.minimum(units[a:b] + fewest[state], IMPOSSIBLE))
    return fewest


def fewest_path(stages: StageCosts, units: Ints, start: int, end: int) -> tuple[Step, ...]:
    """A path from ``start`` to ``end`` with the fewest units; empty when there is none."""
    fewest = fewest_from(stages, units, start)
    if fewest[end] >= IMPOSSIBLE:
        return ()
    bounds, state = _starts(stages), end
    path: list[Step] = []
    while state != start:
        a, b = bounds[state], bounds[state + 1]
        choice = a + int(np.argmin(fewest[stages.first[a:b]] + units[a:b]))
        path.append(Step(int(stages.first[choice]), state, int(units[choice])))
        state = path[-1].first
    return tuple(reversed(path))


def _starts(stages: StageCosts) -> Ints:
    """Index of the first stage that ends at each state, and one more."""
    return np.searchsorted(stages.last, np.arange(stages.state_count + 1))
