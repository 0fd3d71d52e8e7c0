"""The fewest units of a path of stages, for a given time: a dynamic program that bounds the linear program, and prunes it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from planner.pipedream2019.stages import IMPOSSIBLE, Stages

__all__ = ["Step", "fewest_from", "fewest_path", "fewest_to"]

Ints = npt.NDArray[np.int64]


class Step(NamedTuple):
    """A stage [first, last) of a path, on so many units."""

    first: int
    last: int
    units: int


def fewest_from(stages: Stages, units: Ints, start: int) -> Ints:
    """For each state the fewest units of a path from ``start``; each stage takes its ``units``."""
    fewest = np.full(stages.state_count, IMPOSSIBLE, dtype=np.int64)
    fewest[start] = 0
    bounds = stages.starts
    for state in range(start + 1, stages.state_count):
        a, b = bounds[state], bounds[state + 1]
        if a < b:
            fewest[state] = min((fewest[stages.first[a:b]] + units[a:b]).min(), IMPOSSIBLE)
    return fewest


def fewest_to(stages: Stages, units: Ints, end: int) -> Ints:
    """For each state the fewest units of a path to ``end``."""
    fewest = np.full(stages.state_count, IMPOSSIBLE, dtype=np.int64)
    fewest[end] = 0
    bounds = stages.starts
    for state in range(end, 0, -1):  # every stage that ends here extends the paths that begin here
        a, b = bounds[state], bounds[state + 1]
        if a < b and fewest[state] < IMPOSSIBLE:
            np.minimum.at(fewest, stages.first[a:b], np.minimum(units[a:b] + fewest[state], IMPOSSIBLE))
    return fewest


def fewest_path(stages: Stages, units: Ints, start: int, end: int) -> tuple[Step, ...]:
    """A path from ``start`` to ``end`` with the fewest units; empty when there is none."""
    fewest = fewest_from(stages, units, start)
    if fewest[end] >= IMPOSSIBLE:
        return ()
    bounds, path, state = stages.starts, [], end
    while state != start:
        a, b = bounds[state], bounds[state + 1]
        choice = a + int(np.argmin(fewest[stages.first[a:b]] + units[a:b]))
        path.append(Step(int(stages.first[choice]), state, int(units[choice])))
        state = path[-1].first
    return tuple(reversed(path))
