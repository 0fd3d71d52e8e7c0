"""The smallest time T for which a path of stages, each of cost <= T, takes no more units than there are.

T is bisected. Each question is answered by the dynamic program of :mod:`planner.published.state_paths`,
and the two answers that decide, the last yes and the last no, by the linear program of
:mod:`planner.published.path_program` as well: its columns are those through which a path with the fewest units and
stages runs, by the dynamic program, which is all that its optimum can use; where thousands tie, some.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.published.path_program import Column, cheapest_path
from planner.published.state_paths import IMPOSSIBLE, StageCosts, Step, fewest_from, fewest_path, fewest_to
from planner.spec.errors import PipedreamError

__all__ = ["EQUAL", "Bottleneck", "least_time", "path_cost_us"]

NO_TIME_US = 1e-200  # times below this are none: they cannot be told apart
EQUAL = 1e-9  # relative difference below which two times are one
_MOST_COLUMNS = 3000
_MANY = 20_000  # stages, of which those out of reach are put aside
_CLOSE = 1e-3  # once the bracket is this narrow, the best found is tried as the answer


class Bottleneck(NamedTuple):
    """The best path, its largest cost, and a time that none is below."""

    steps: tuple[Step, ...]
    time_us: float
    bound_us: float


def path_cost_us(stages: StageCosts, steps: tuple[Step, ...]) -> float:
    """The largest cost of a path's stages."""
    chosen = [int(np.flatnonzero((stages.first == s.first) & (stages.last == s.last))[0]) for s in steps]
    return float(stages.some(np.array(chosen)).cost_us(np.array([max(s.units, 1) for s in steps])).max())


def least_time(stages: StageCosts, start: int, end: int, most_units: int, most_replicas: int, *,
               at_most_us: float = np.inf) -> Bottleneck | None:
    """The smallest bottleneck of a path from ``start`` to ``end`` on ``most_units``; None when there is none below ``at_most_us``."""
    whole = np.flatnonzero((stages.first == start) & (stages.last == end))
    best: tuple[Step, ...] = ()
    low_us = 0.0  # nothing is faster
    if len(whole):
        alone = [float(stages.cost_us(m)[whole[0]]) for m in range(1, min(most_units, most_replicas) + 1)]
        best, high_us = (Step(start, end, int(np.argmin(alone)) + 1),), min(alone)
    else:
        high_us = float(stages.cost_us(1).max(initial=0.0)) * (1 + EQUAL)
    if high_us > at_most_us:
        best, high_us = (), at_most_us
    found = _try(stages, start, end, most_units, most_replicas, high_us)
    if not found:
        return None
    if path_cost_us(stages, found) < high_us or not best:
        best, high_us = found, path_cost_us(stages, found)
    tried, kept = False, _useful(stages, start, end, most_units, most_replicas, high_us)
    while high_us > low_us * (1 + EQUAL) and high_us > NO_TIME_US:
        last_call = not tried and high_us <= low_us * (1 + _CLOSE)
        middle_us = high_us * (1 - EQUAL / 2) if last_call else (low_us + high_us) / 2
        found = _try(kept, start, end, most_units, most_replicas, middle_us)
        tried = last_call
        if found:
            best, high_us = found, path_cost_us(kept, found)
            kept = _useful(kept, start, end, most_units, most_replicas, high_us)
        else:
            low_us = middle_us
    return _decided(kept, start, end, most_units, most_replicas, best, high_us, low_us)


def _try(stages: StageCosts, start: int, end: int, most_units: int, most_replicas: int, time_us: float) -> tuple[Step, ...]:
    path = fewest_path(stages, stages.units(time_us, min(most_units, most_replicas)), start, end)
    return path if sum(step.units for step in path) <= most_units else ()


def _useful(stages: StageCosts, start: int, end: int, most_units: int, most_replicas: int, time_us: float) -> StageCosts:
    """The stages that a path within ``time_us``, or any smaller time, may contain."""
    if len(stages.first) < _MANY:
        return stages
    units = stages.units(time_us, min(most_units, most_replicas))
    ahead, behind = fewest_from(stages, units, start), fewest_to(stages, units, end)
    return stages.some(np.flatnonzero(ahead[stages.first] + units + behind[stages.last] <= most_units))


def _decided(stages: StageCosts, start: int, end: int, most_units: int, most_replicas: int, best: tuple[Step, ...], high_us: float,
             low_us: float) -> Bottleneck:
    """The linear program's word on both: a path within ``high_us``, and none within ``low_us``."""
    yes = _program(stages, start, end, min(most_units, most_replicas), high_us * (1 + EQUAL))
    no = _program(stages, start, end, min(most_units, most_replicas), low_us) if low_us > 0 else None
    if yes is None or yes[0] > most_units or (no is not None and no[0] <= most_units):
        raise PipedreamError(f"the linear program and the dynamic program differ: {high_us:.9g} and {low_us:.9g} us on {most_units} units",
                             hint="please report this with the profile and the cluster")
    steps = tuple(Step(*column) for column in yes[1])
    return Bottleneck(steps, path_cost_us(stages, steps), low_us)


def _program(stages: StageCosts, start: int, end: int, most: int, time_us: float) -> tuple[int, list[Column]] | None:
    units = stages.units(time_us, most)
    weights = np.minimum(units * stages.state_count + 1, IMPOSSIBLE)  # units first, then stages
    ahead, behind = fewest_from(stages, weights, start), fewest_to(stages, weights, end)
    if ahead[end] >= IMPOSSIBLE:
        return None
    kept = np.flatnonzero(ahead[stages.first] + weights + behind[stages.last] <= ahead[end])
    if len(kept) > _MOST_COLUMNS:  # equally good ones: any that hold a best path will do
        path = {(step.first, step.last) for step in fewest_path(stages, weights, start, end)}
        on_path = [i for i in kept if (int(stages.first[i]), int(stages.last[i])) in path]
        kept = np.unique([*kept[:_MOST_COLUMNS], *on_path])
    return cheapest_path([Column(int(stages.first[i]), int(stages.last[i]), int(units[i])) for i in kept], start, end)
